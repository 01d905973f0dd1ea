"""The calls that a board consists of, one per Lua script. Cluster postings and the jobboard are built on them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Literal, NamedTuple
from uuid import uuid4

import redis

from opencue_sched.clients.lua_scripts import Fence, ScriptCall, call_script, call_scripts
from opencue_sched.coordination.keys import BoardKeys


class JobPriority(StrEnum):
    """How urgent a job is."""

    VERY_HIGH = "VERY_HIGH"
    HIGH = "HIGH"
    NORMAL = "NORMAL"
    LOW = "LOW"
    VERY_LOW = "VERY_LOW"

    @classmethod
    def convert(cls, value: JobPriority | str) -> JobPriority:
        """A priority from its name in any case. Raises ValueError naming the choices."""
        if isinstance(value, str) and value.upper() in cls.__members__:
            return cls(value.upper())
        raise ValueError(f"{value!r} is no job priority; use one of {', '.join(cls.__members__)}")

    @property
    def rank(self) -> int:
        """0 for the most urgent to 4."""
        return list(type(self)).index(self)


NEVER = math.inf
"""The life of a claim that does not expire."""
ERROR_CHARACTERS = 4000
"""How many characters of an error's text a job keeps, from its end."""
PAGE = 100
"""How many jobs one call of a listing reads, each with all its fields: Redis serves nobody else while a script runs."""
RESEND_SECONDS = 0.8
"""How long after it was sent a message counts as lost if no claim has answered it. A cluster whose worker died before
its claim goes on so much later. With less time, more messages that only wait in a busy queue are sent twice; the second
is refused as stale, and each further wait is twice as long, up to 16 times this."""
# The words of lua/board_end.lua, lua/board_update.lua and lua/board_page.lua, which say what each does.
End = Literal["again", "abandon", "sleep", "idle", "put_off", "fail", "consume", "trash"]
Update = Literal["trash", "restore", "rest", "withdraw"]
Pages = Literal["ready", "listed", "trash"]
Held = tuple[str, str, int, str]
"""A claim as every write under it names it: the job's uuid, owner, fence and token."""


def life_ms(seconds: float) -> int:
    """A claim's life as the scripts take times: 0 for one that never ends."""
    return 0 if seconds == NEVER else max(1, round(seconds * 1000))


@dataclass(frozen=True, slots=True)
class Listing:
    """One job as it was at one moment."""

    uuid: str
    fields: dict[str, str]
    """The fields of the job's hash. Nobody changes them after they were read."""
    left_ms: float | None = None
    """Milliseconds until the job's claim expires: -1 for a claim that never does, -2 without a claim, None in a page of
    jobs, where it is not read."""


class Counts(NamedTuple):
    """How many jobs of a board are in each state."""

    ready: int
    delayed: int
    claimed: int
    trash: int
    next_ms: int
    """Milliseconds until the next job becomes ready by itself, because it is due or its claim expires; -1 when none
    will."""


class BoardScripts:
    """The scripts on one board's keys.

    Redis clients make a call again whose answer was lost. Claims, ends and updates carry a token of the call, so that
    the second gets the answer of the first; a caller that means it a second time makes another call.

    ``resend_seconds``: how long after it was sent a message counts as lost if no claim has answered it.
    """

    def __init__(self, client: redis.Redis, keys: BoardKeys, *, resend_seconds: float = RESEND_SECONDS) -> None:
        self.client = client
        self.keys = keys
        self.resend_ms = round(resend_seconds * 1000)
        """``resend_seconds`` in milliseconds, as the scripts take times."""

    def call(self, script: str, *args: str | int | float) -> Any:
        """Run a script of the board, and return its answer."""
        return call_script(self.client, script, self.keys.parts(), [self.keys.job(""), *args])

    def call_each(
        self, script: str, argument_lists: Sequence[Sequence[str | int | float]], *, fence: Fence | None = None
    ) -> list[Any]:
        """One script with several arguments, in one round trip; Redis Cluster takes no scripts in a pipeline.

        Raises FencedOff when a leader after that of ``fence`` was elected.
        """
        parts = self.keys.parts()
        calls = [ScriptCall(script, parts, [self.keys.job(""), *args]) for args in argument_lists]
        return call_scripts(self.client, calls, fence=fence)[0] if calls else []

    def claim_job(
        self, uuid: str, owner: str, token: str, *, life: float, ticket: int | None = None, again: float | None = None
    ) -> list[Any]:
        """Claim a job, or with an empty ``uuid`` the next one; returns the answer of lua/board_claim.lua.

        ``life``: of the claim, in seconds. ``ticket``: of the message that the claim answers. ``again``: a claim that
        the owner has already is not made anew, and gets this life.
        """
        answered = "" if ticket is None else ticket
        anew = "" if again is None else life_ms(again)
        return list(self.call("board_claim", uuid, owner, life_ms(life), answered, anew, token, self.keys.call(token)))

    def end_call(
        self, held: Held, how: End, *, delay_seconds: float = 0.0, wake: int = 0, reason: str = "", error: str = ""
    ) -> Sequence[str | int | float]:
        """The arguments with which board_end ends the claim ``held``, among them a token of this call.
        lua/board_end.lua says what each end means, and what it answers."""
        more = (round(delay_seconds * 1000), wake, reason, error[-ERROR_CHARACTERS:], self.keys.call(uuid4().hex))
        return (*held, how, *more, self.resend_ms)

    def update(self, uuid: str, how: Update, value: str | int = "", *, force: bool = False) -> list[Any]:
        """Do to a job what an operator wants, also to a claimed one; returns the answer of lua/board_update.lua."""
        return list(self.call("board_update", uuid, how, value, int(force), self.keys.call(uuid4().hex)))

    def job(self, uuid: str) -> Listing | None:
        """What Redis has of a job at this moment; None when the job is gone."""
        *_, fields, left = self.call("board_look", uuid)
        return Listing(uuid, field_map(fields), left_ms=float(left)) if fields else None

    def listings(self, which: Pages) -> Iterator[Listing]:
        """The jobs that are ``which``, highest priority and then oldest first (in the trash: oldest first). The
        iterator reads a page of them when it has come to the end of the one before."""
        after = "-inf"
        while rows := self.call("board_page", which, after, PAGE):
            yield from (Listing(str(uuid), field_map(fields)) for uuid, _, fields in rows)
            after = str(rows[-1][1])

    def counts(self) -> Counts:
        """Count the jobs in each state, at this moment."""
        return Counts(*self.call("board_look", "")[:5])


def field_map(flat: Sequence[Any]) -> dict[str, str]:
    """A hash, from the fields and values that a script answers in turn."""
    return {str(flat[place]): str(flat[place + 1]) for place in range(0, len(flat), 2)}
