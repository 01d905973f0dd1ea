"""How long each call of a script kept Redis's processor, and how long it took by the wall's clock: Redis itself says.

A server carries out a script in one piece, so it can be asked in the script, first thing and last thing, how much
processor time it has used (INFO) and what time it is (TIME). What lies between is this call's, whoever else is
connected. While the machine runs something else instead of Redis only the second clock goes on. Needs no /proc. (The
newest servers let TIME stand still in a script, and so tell nothing of what was waited for.)
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import redis
from redis.commands.core import ScriptCommands

from opencue_sched.clients.lua_scripts import LuaScript, load_script, lua_directory

_NOTES = "benchmark:script_calls"
# The thread that carries out scripts; beside it another may be freeing what they have unlinked. On Linux a question for
# both brings the thread's own time up to date as well. Where threads are not told apart the whole process counts.
_TIMED = """
local function used()
  local cpu, sum = redis.call('INFO', 'cpu'), 0
  for _, field in ipairs({'used_cpu_sys', 'used_cpu_user'}) do
    sum = sum + (string.match(cpu, field .. '_main_thread:([%d.]+)') or string.match(cpu, field .. ':([%d.]+)'))
  end
  return 1000000 * sum
end
local function script()
<script>
end
local began, before = redis.call('TIME'), used()
local answer = script()
local spent, ended = used() - before, redis.call('TIME')
local wall = 1000000 * (ended[1] - began[1]) + ended[2] - began[2]
redis.call('RPUSH', '<notes>', string.format('<name> %.0f %.0f', spent, wall))
return answer
"""


@dataclass(frozen=True)
class TimedCall:
    """One call of the script ``name``; the two clocks' questions, some 15 microseconds, are contained."""

    name: str
    processor_ms: float
    wall_ms: float

    @property
    def waited_ms(self) -> float:
        """For so long something else had Redis's processor in the midst of the call."""
        return max(0.0, self.wall_ms - self.processor_ms)


@contextmanager
def scripts_timed() -> Iterator[None]:
    """Each call that this process makes meanwhile leaves a note in the database it is made in.

    Redis's client sends another script in the place of each of ours.
    """
    ours = {path.stem: load_script(path.stem) for path in lua_directory().glob("*.lua")}
    instead = {script.sha: timed(name, script).sha for name, script in ours.items()}
    instead |= {script.text: timed(name, script).text for name, script in ours.items()}
    evalsha, evaluate = ScriptCommands.evalsha, ScriptCommands.eval

    def timed_evalsha(client: Any, sha: str, *arguments: Any) -> Any:
        return evalsha(client, instead.get(sha, sha), *arguments)

    def timed_eval(client: Any, text: str, *arguments: Any) -> Any:
        return evaluate(client, instead.get(text, text), *arguments)

    with patch.multiple(ScriptCommands, evalsha=timed_evalsha, eval=timed_eval):
        yield


def timed(name: str, script: LuaScript) -> LuaScript:
    """The same script between two looks at the clocks. A call that fails leaves no note."""
    text = _TIMED.replace("<notes>", _NOTES).replace("<name>", name).replace("<script>", script.text)
    return LuaScript(text, hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest())


def calls_noted(client: redis.Redis) -> list[TimedCall]:
    """All calls since this was asked last, or since the database was emptied."""
    with client.pipeline() as pipe:
        pipe.lrange(_NOTES, 0, -1)
        pipe.delete(_NOTES)
        notes, _ = pipe.execute()
    words = [str(note).split() for note in notes]
    return [TimedCall(name, int(spent) / 1000, int(wall) / 1000) for name, spent, wall in words]
