"""Reading the text of a job file: YAML or JSON, without the surprises of either.

YAML 1.1 turns ``shot: 0010`` into 8, ``name: no`` into false, ``1:30`` into 90 and ``2026-01-01`` into a date, and of a
key that is given twice it quietly keeps the second. Here numbers are plain numbers, only true and false are flags,
everything else is text, and a key given twice is an error.

A ``#`` after a space begins a comment in any YAML, so ``command: render #IFRAME# --out x`` would be ``render``. A
comment that begins like a token is an error where it cuts a value off.
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable, Iterator
from contextlib import suppress
from typing import Any

import yaml

from opencue_sched.domain.command import TOKEN
from opencue_sched.domain.job_spec import InvalidJobSpec, JobSpec

_CUT_OFF = re.compile(rf"[ \t]+({TOKEN.pattern})")
_BLOCKS = ("|", ">")


class _NotYaml(InvalidJobSpec):
    """Text that cannot be read as YAML."""


class _Loader(yaml.SafeLoader):
    """A safe loader with the scalars of YAML 1.2's core, no more."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"key {key!r} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


for _tag, _pattern, _first in (
    ("bool", r"^(?:true|True|TRUE|false|False|FALSE)$", "tTfF"),
    ("int", r"^-?(?:0|[1-9][0-9]*)$", "-0123456789"),
    ("float", r"^-?(?:0|[1-9][0-9]*)\.[0-9]+(?:[eE][-+]?[0-9]+)?$", "-0123456789"),
    ("null", r"^(?:~|null|Null|NULL|)$", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list(_first))


def read_job_file(content: bytes, *, default_user: str | None = None) -> JobSpec:
    """The job in a file's content. Raises InvalidJobSpec with every problem, or the one that made it unreadable."""
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidJobSpec([f"not UTF-8 text (byte {error.start + 1})"]) from error
    return JobSpec.parse(_json(text) if text.lstrip().startswith("{") else _yaml(text), default_user=default_user)


def _yaml(text: str) -> object:
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        problems = list(_cut_off(root, text, "", set()))
        if problems:
            raise InvalidJobSpec(problems)
        return loader.construct_document(root)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise _NotYaml([f"{where}not YAML: {error.problem or error}"]) from error
    except (yaml.YAMLError, RecursionError) as error:
        raise _NotYaml([f"not YAML: {str(error).splitlines()[0]}"]) from error
    finally:
        loader.dispose()


def _cut_off(node: yaml.Node, text: str, path: str, seen: set[int]) -> Iterator[str]:
    """A problem for each value in a node that a comment beginning like a token cuts off. ``seen``: nodes looked at
    already, which an alias leads to once more."""
    if id(node) in seen:
        return
    seen.add(id(node))
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            name = str(key.value) if isinstance(key, yaml.ScalarNode) else "?"
            yield from _cut_off(value, text, f"{path}.{name}" if path else name, seen)
    elif isinstance(node, yaml.SequenceNode):
        for position, entry in enumerate(node.value):
            yield from _cut_off(entry, text, f"{path}[{position}]", seen)
    elif isinstance(node, yaml.ScalarNode) and node.style not in _BLOCKS:
        comment = _CUT_OFF.match(text, node.end_mark.index)
        if comment is not None:
            yield (
                f"line {node.end_mark.line + 1}: {path}: {comment[1]} and what follows is a comment here; put the text "
                "in quotes"
            )


def _json(text: str) -> object:
    try:
        return json.loads(text, object_pairs_hook=_without_repeats)
    except json.JSONDecodeError as error:
        with suppress(_NotYaml):
            return _yaml(text)  # YAML's own {flow: mapping} begins with a brace as well
        raise InvalidJobSpec([f"line {error.lineno}, column {error.colno}: not JSON: {error.msg}"]) from error
    except RecursionError as error:
        raise InvalidJobSpec(["not JSON: nested too deeply"]) from error


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        keys = [key for key, _ in pairs]
        repeated = next(key for key in keys if keys.count(key) > 1)
        raise InvalidJobSpec([f"key {repeated!r} is given twice"])
    return mapping
