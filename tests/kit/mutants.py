"""Production code that is broken on purpose: the controls that show that a test fails where a rule is missing.

Here alone tests replace anything of the package but clocks and the network. A rule is a piece of source text; a control
whose rule has come to read otherwise says so.
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import pytest

from opencue_sched.clients import lua_scripts
from opencue_sched.clients.lua_scripts import load_script, lua_directory


@contextmanager
def changed_code(module: ModuleType, changes: Mapping[str, str]) -> Iterator[None]:
    """The functions of ``module`` follow each rule's substitute, also where they were imported before."""
    source = _changed(inspect.getsource(module), changes)
    compiled = compile(source, f"<{module.__name__}, changed>", "exec", dont_inherit=True)
    codes = {code.co_qualname: code for code in _codes(compiled)}
    with pytest.MonkeyPatch.context() as patch:
        for function in _functions(module, module.__name__):
            code = codes.get(function.__code__.co_qualname, function.__code__)
            if code != function.__code__:
                patch.setattr(function, "__code__", code)
        yield


@contextmanager
def changed_script(path: str, changes: Mapping[str, str]) -> Iterator[None]:
    """The file ``path`` of lua/ has each rule's substitute, in whatever script includes it."""
    try:
        with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
            lua = shutil.copytree(lua_directory(), Path(directory, "lua"))
            (lua / path).write_text(_changed((lua / path).read_text(), changes))
            patch.setattr(lua_scripts, "lua_directory", lambda: lua)
            load_script.cache_clear()
            yield
    finally:
        load_script.cache_clear()


def _changed(source: str, changes: Mapping[str, str]) -> str:
    for rule, instead in changes.items():
        assert source.count(rule) == 1, f"{rule!r} is not in the source, or more than once"
        source = source.replace(rule, instead)
    return source


def _codes(code: CodeType) -> Iterator[CodeType]:
    """The code of each function below this one."""
    for part in code.co_consts:
        if isinstance(part, CodeType):
            yield part
            yield from _codes(part)


def _functions(owner: object, module: str) -> Iterator[FunctionType]:
    """The functions that a module has of its own, and those of its classes."""
    for value in vars(owner).values():
        if getattr(value, "__module__", None) != module:
            continue
        if isinstance(value, FunctionType):
            yield value
        elif inspect.isclass(value):
            yield from _functions(value, module)
