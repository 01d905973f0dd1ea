"""The Lua scripts of this package, and the way they are called.

Scripts live in ``lua/`` (``opencue_sched/_lua`` in a wheel). A line ``--@include NAME`` is replaced by
``lua/includes/NAME.lua``. Calls go by EVALSHA; to a server that does not know a script the call is sent again by EVAL,
after which it knows the script - only that call, so nothing in a pipeline ever runs twice. The command SCRIPT is not
needed: hosted servers take it away.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import redis
from redis.exceptions import NoScriptError

from opencue_sched.errors import FencedOff

_INCLUDE = re.compile(r"^--@include ([a-z0-9_]+)\s*$", re.MULTILINE)
_T = TypeVar("_T")
_PACKAGE = Path(__file__).resolve().parents[1]


def lua_directory() -> Path:
    """The directory of the scripts: inside an installed wheel, or beside the package in a checkout."""
    in_wheel = _PACKAGE / "_lua"
    return in_wheel if in_wheel.is_dir() else _PACKAGE.parent / "lua"


@dataclass(frozen=True, slots=True)
class LuaScript:
    """A script's text with its includes, and the SHA-1 by which Redis knows it."""

    text: str
    sha: str


@cache
def load_script(name: str) -> LuaScript:
    """The script ``lua/NAME.lua``."""
    text = _expand(lua_directory() / f"{name}.lua")
    return LuaScript(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def _expand(path: Path) -> str:
    """The text of a script with the text of each file that it includes, in any depth, in the include's place."""
    text = path.read_text(encoding="utf-8")
    return _INCLUDE.sub(lambda found: _expand(lua_directory() / "includes" / f"{found[1]}.lua"), text)


def chunks(items: Sequence[_T], size: int) -> list[Sequence[_T]]:
    """Cut ``items`` into pieces of ``size``: Redis serves nobody else while a call runs, so a long one is cut."""
    return [items[start : start + size] for start in range(0, len(items), size)]


@dataclass(frozen=True, slots=True)
class ScriptCall:
    """One call of one script."""

    name: str
    keys: Sequence[str]
    args: Sequence[str | int | float]


FENCED = "fenced"


def call_script(client: redis.Redis, name: str, keys: Sequence[str], args: Sequence[str | int | float]) -> Any:
    """Run one script and return its answer."""
    return call_text(client, load_script(name), keys, args)


def call_text(client: redis.Redis, script: LuaScript, keys: Sequence[str], args: Sequence[str | int | float]) -> Any:
    """Run a script that need not be one of ours, and return its answer."""
    try:
        return client.evalsha(script.sha, len(keys), *keys, *args)
    except NoScriptError:
        return client.eval(script.text, len(keys), *keys, *args)


def call_scripts(
    client: redis.Redis,
    calls: Sequence[ScriptCall],
    *,
    reads: Sequence[Sequence[str | int]] = (),
    raising: bool = True,
    fence: Fence | None = None,
) -> tuple[list[Any], list[Any]]:
    """Run many scripts, then the plain commands ``reads``, in one round trip, in order, not as a transaction.

    Returns the answers of both. An error of one call does not keep the others from running; the first error is raised
    when all have been read, or with ``raising`` False each stands among the answers. Scripts the server did not know
    are called in a second round trip. Under a ``fence`` scripts that include ``ledger`` or ``board`` do
    nothing once a newer leader is recorded; then FencedOff is raised.
    """
    if fence is not None:
        calls = [ScriptCall(call.name, (*call.keys, fence.key), (*call.args, fence.number)) for call in calls]
    answers = _pipelined(client, calls, reads)
    unknown = [place for place, answer in enumerate(answers[: len(calls)]) if isinstance(answer, NoScriptError)]
    if unknown:
        again = _pipelined(client, [calls[place] for place in unknown], reads, with_texts=True)
        for place, answer in zip(unknown, again, strict=False):
            answers[place] = answer
        answers[len(calls) :] = again[len(unknown) :]
    for answer in answers:
        if raising and isinstance(answer, Exception):
            raise answer
        if fence is not None and isinstance(answer, list) and len(answer) == 4 and answer[1] == FENCED:
            raise FencedOff(f"the leader of fence {fence.number} was succeeded by that of fence {answer[2]}")
    return answers[: len(calls)], answers[len(calls) :]


def _pipelined(
    client: redis.Redis,
    calls: Sequence[ScriptCall],
    reads: Sequence[Sequence[str | int]],
    *,
    with_texts: bool = False,
) -> list[Any]:
    """The answers; ``with_texts``: the first call of each script has its text, by which the server knows the others."""
    known: set[str] = set()
    with client.pipeline(transaction=False) as pipe:
        for call in calls:
            script = load_script(call.name)
            if with_texts and call.name not in known:
                pipe.eval(script.text, len(call.keys), *call.keys, *call.args)
                known.add(call.name)
            else:
                pipe.evalsha(script.sha, len(call.keys), *call.keys, *call.args)
        for read in reads:
            pipe.execute_command(*read)  # type: ignore[no-untyped-call]
        return list(pipe.execute(raise_on_error=False))


# What a periodic task acts under.


@dataclass(frozen=True, slots=True)
class Fence:
    """The fence of the leader that sent a periodic task, and the Redis key under which the newest one is recorded."""

    key: str
    number: int
