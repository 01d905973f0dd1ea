"""Many jobs of a board at a time: had by an owner for a while, and on the board only while somebody has them.

One call of a script takes as many as may be, and another is done with them; what a dead owner left is forgotten by
whoever takes next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import redis

from opencue_sched.coordination.board import TRASH_KEPT_SECONDS, BoardScripts, life_ms
from opencue_sched.coordination.job import JobPriority, Payload
from opencue_sched.coordination.names import BoardKeys

JOBS_PER_CALL = 50
"""A call of so many takes Redis half a millisecond, for which everybody else waits; more are several calls."""
_PAYLOAD = Payload({}, None).encode()
_PRIORITY = JobPriority.NORMAL


class ManyJobs:
    """Such jobs of one board. Each has a uuid of the caller's choice, which is also its name."""

    def __init__(self, client: redis.Redis, keys: BoardKeys) -> None:
        self._scripts = BoardScripts(client, keys)

    def take(self, owner: str, token: str, seconds: Mapping[str, float]) -> dict[str, int]:
        """Claim jobs, each for its seconds: uuid -> fence, of those that nobody else has. One round trip.

        Of an owner there is one at a time: what an earlier one left, known by another ``token``, is this one's. What it
        has by this token lives anew.
        """
        first = (owner, token, _PAYLOAD, _PRIORITY.rank, round(TRASH_KEPT_SECONDS * 1000))
        chunks = _chunks(seconds)
        calls = [[*first, *(value for uuid in chunk for value in (uuid, life_ms(seconds[uuid])))] for chunk in chunks]
        fences: dict[str, int] = {}
        for chunk, answer in zip(chunks, self._scripts.call_each("board_take_many", calls), strict=True):
            fences |= {uuid: int(fence) for uuid, fence in zip(chunk, answer, strict=True) if fence}
        return fences

    def consume(self, owner: str, token: str, uuids: Iterable[str]) -> int:
        """The jobs that ``owner`` took by ``token``, and nobody since, are done and gone; how many. One round trip."""
        calls = [(owner, token, *chunk) for chunk in _chunks(uuids)]
        return sum(int(gone) for gone in self._scripts.call_each("board_consume_many", calls))


def _chunks(uuids: Iterable[str]) -> list[list[str]]:
    listed = list(uuids)
    return [listed[start : start + JOBS_PER_CALL] for start in range(0, len(listed), JOBS_PER_CALL)]
