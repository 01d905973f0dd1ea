"""The calls that a board consists of: one per Lua script, with its arguments named. Cluster postings and the jobboard
are built from them.
"""

from __future__ import annotations

import math
import uuid as uuids
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import redis
from redis.sentinel import SentinelConnectionPool

from opencue_sched.coordination.names import BoardKeys
from opencue_sched.domain.cluster import Fence
from opencue_sched.domain.redis_url import UNDECODABLE
from opencue_sched.lua_scripts import ScriptCall, call_script, call_scripts, check_fence, under_fence

NEVER = math.inf
"""A claim that does not end by itself."""

ERROR_CHARACTERS = 4000
TRASH_KEPT_SECONDS = 7 * 86400.0
RESEND_SECONDS = 0.8
"""So long after it was sent, a message that no claim answered counts as lost."""

End = Literal["again", "abandon", "sleep", "idle", "put_off", "fail", "consume", "trash"]
Update = Literal["trash", "restore", "rest", "delete"]
Pages = Literal["ready", "listed", "trash"]


def life_ms(seconds: float) -> int:
    """A claim's life as the scripts want it: 0 for one that never ends."""
    return 0 if seconds == NEVER else max(1, round(seconds * 1000))


def resend_ms() -> int:
    """RESEND_SECONDS as the scripts want it."""
    return round(RESEND_SECONDS * 1000)


def new_token() -> str:
    """What tells a claim from every other, whatever Redis forgets."""
    return uuids.uuid4().hex


def decoding(client: redis.Redis) -> redis.Redis:
    """``client`` if it decodes responses; else one like it that does, with connections of its own.

    Raises ValueError when it was made by way of Sentinels: then it must be made with ``decode_responses=True``.
    """
    if client.get_encoder().decode_responses:
        return client
    pool = getattr(client, "connection_pool", None)
    if not isinstance(pool, redis.ConnectionPool) or isinstance(pool, SentinelConnectionPool):
        raise ValueError("the client of a board must be made with decode_responses=True")
    options = {**pool.connection_kwargs, "decode_responses": True, "encoding_errors": UNDECODABLE}
    return redis.Redis.from_pool(redis.ConnectionPool(connection_class=pool.connection_class, **options))


@dataclass(frozen=True, slots=True)
class Listing:
    """One job as it was at one moment. ``left_ms`` of its claim: -1 never ends, -2 no claim, None not asked for."""

    uuid: str
    fields: dict[str, str]
    score: str = ""
    left_ms: float | None = None

    @property
    def fence(self) -> int:
        return int(self.fields.get("fence", "0"))

    @property
    def token(self) -> str:
        """Of the present or last claim."""
        return self.fields.get("claim", "")


@dataclass(frozen=True, slots=True)
class Counts:
    """How many jobs are where; ``next_seconds`` until one becomes ready by itself, None when none will."""

    ready: int
    delayed: int
    claimed: int
    trash: int
    next_seconds: float | None


class BoardScripts:
    """The scripts on one board's keys.

    Redis clients make a call again whose answer was lost. Claims, ends and updates carry a token of the call, so that
    the second gets the answer of the first; whoever means it a second time makes another call.
    """

    def __init__(self, client: redis.Redis, keys: BoardKeys) -> None:
        self.client = client
        self.keys = keys
        self._parts = keys.parts()
        self._prefix = keys.job("")

    def call(self, script: str, *args: str | int | float) -> Any:
        return call_script(self.client, script, self._parts, [self._prefix, *args])

    def call_each(
        self, script: str, argument_lists: Sequence[Sequence[str | int | float]], *, fence: Fence | None = None
    ) -> list[Any]:
        """One script with several arguments, in one round trip; Redis Cluster takes no scripts in a pipeline, and no
        ``fence``. Raises FencedOff when a leader after that of ``fence`` was elected."""
        if isinstance(self.client, redis.RedisCluster):
            return [self.call(script, *args) for args in argument_lists]
        calls = [ScriptCall(script, self._parts, [self._prefix, *args]) for args in argument_lists]
        if not calls:
            return []
        answers, _ = call_scripts(self.client, calls if fence is None else under_fence(fence, calls))
        if fence is not None:
            check_fence(fence, answers)
        return answers

    def post(self, uuid: str, name: str, key: str, payload: str, rank: int, *, delay_seconds: float) -> Listing:
        """The job as it was posted, or the one that has this key already."""
        delay, kept = max(0, round(delay_seconds * 1000)), round(TRASH_KEPT_SECONDS * 1000)
        call = self.keys.call(uuid)
        _, there, fields = self.call("board_post", uuid, name, key, payload, rank, delay, kept, call)
        return Listing(str(there), _mapping(fields))

    def claim(
        self, uuid: str, owner: str, token: str, *, life: float, ticket: int | None = None, again: float | None = None
    ) -> list[Any]:
        return list(
            self.call(
                "board_claim",
                uuid,
                owner,
                life_ms(life),
                "" if ticket is None else ticket,
                "" if again is None else life_ms(again),
                token,
            )
        )

    def next(self, owner: str, token: str, *, life: float, highest: int, lowest: int) -> list[Any]:
        """Claim the first ready job of these priority ranks, 0 the highest."""
        return list(self.call("board_next", owner, life_ms(life), highest, lowest, token, self.keys.call(token)))

    def end(
        self,
        uuid: str,
        owner: str,
        fence: int,
        token: str,
        how: End,
        *,
        delay_seconds: float = 0.0,
        wake: int = 0,
        reason: str = "",
        error: str = "",
    ) -> list[Any]:
        delay = round(delay_seconds * 1000)
        text = error[-ERROR_CHARACTERS:]
        call = self.keys.call(new_token())
        more = (delay, wake, reason, text, call, resend_ms())
        return list(self.call("board_end", uuid, owner, fence, token, how, *more))

    def update(self, uuid: str, how: Update, value: str | int = "", *, force: bool = False) -> list[Any]:
        return list(self.call("board_update", uuid, how, value, int(force), self.keys.call(new_token())))

    def job(self, uuid: str) -> Listing | None:
        """One job now; None when it is gone."""
        fields, left = self.call("board_job", uuid)
        return Listing(uuid, _mapping(fields), left_ms=float(left)) if fields else None

    def page(self, which: Pages, after: str, count: int) -> list[Listing]:
        """The next ``count`` jobs after a score (``-inf`` for the first), highest priority and oldest first."""
        rows = self.call("board_page", which, after, count)
        return [Listing(str(uuid), _mapping(fields), str(score)) for uuid, score, fields in rows]

    def counts(self) -> Counts:
        ready, delayed, claimed, trash, left = self.call("board_look")
        return Counts(int(ready), int(delayed), int(claimed), int(trash), left / 1000 if left >= 0 else None)


def _mapping(flat: Sequence[Any]) -> dict[str, str]:
    return {str(flat[i]): str(flat[i + 1]) for i in range(0, len(flat), 2)}
