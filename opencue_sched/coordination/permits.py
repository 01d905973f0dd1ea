"""Layer permits: one pass at a time works on a layer (distributed scheduler reference, "Layer Permit").

A permit is a job of a board of its own, with the layer's id, and there while some pass has it. Its claim lives 2 s per
frame the pass may book, at least 2 s and at most as long as a cluster claim does unless it is prolonged; for what is
planned it is prolonged until the commit's deadline, and at the end of the pass it is consumed. It spares work lost to
races between passes of overlapping clusters; correctness never depends on it. The reference has no upper bound: a
process that dies there in a pass over 20 frames keeps everybody off their layer for 40 s.

A pass reads the frames of its layers before it asks for their permits. Of a layer that another pass worked on meanwhile
it has read just the frames that the other booked, and could only lose them. So whoever books frames says so in a log of
the fleet, and whoever has permits looks there for what it has read too early.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import cast

import redis

from opencue_sched.coordination.board import TRASH_KEPT_SECONDS, BoardScripts, life_ms
from opencue_sched.coordination.job import JobPriority, Payload
from opencue_sched.coordination.names import BoardKeys, layers_booked, permit_board

# Many jobs of a board at a time: had by an owner for a while, and on the board only while somebody has them.
#
# One call of a script takes as many as may be, and another is done with them; what a dead owner left is forgotten by
# whoever takes next.

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


SECONDS_PER_FRAME = 2.0
_BOOKINGS_TOLD = 1_000
"""More than a fleet commits while a pass reads and asks. Who asks later than that loses what others booked, as ever."""
_BOOKINGS_TOLD_SECONDS = 60
_BEGINNING = "0-0"


class LayerPermits:
    """Permits of one namespace. ``claim_ttl``: seconds that a claim on a cluster lives unless it is prolonged.

    An owner is ``place|token``, or a token alone. Of a place there is one at a time: each also gets what an earlier one
    of its place left.
    """

    def __init__(self, client: redis.Redis, namespace: str, *, claim_ttl: float) -> None:
        self._client = client
        self._jobs = ManyJobs(client, permit_board(namespace))
        self._log = layers_booked(namespace)
        self._claim_ttl = claim_ttl

    def take(self, owner: str, frames_by_layer: Mapping[str, int]) -> frozenset[str]:
        """Layer ids granted to ``owner``, out of layer id -> frames to be looked at. One round trip."""
        seconds = {
            layer: min(self._claim_ttl, SECONDS_PER_FRAME * max(1, frames)) for layer, frames in frames_by_layer.items()
        }
        return frozenset(self._jobs.take(*_place_and_token(owner), seconds))

    def keep(self, owner: str, layers: Iterable[str], *, seconds: float) -> None:
        """Have those of ``layers`` that are ``owner``'s for so long from now. One round trip."""
        self._jobs.take(*_place_and_token(owner), dict.fromkeys(layers, seconds))

    def drop(self, owner: str, layers: Iterable[str]) -> int:
        """Give back those of ``layers`` that are ``owner``'s; returns how many were. One round trip."""
        return self._jobs.consume(*_place_and_token(owner), layers)

    def tell_booked(self, layers: Collection[str]) -> None:
        """Frames of these layers are booked and committed; to be told before permits are given back. One round trip."""
        if not layers:
            return
        pipeline = self._client.pipeline(transaction=True)  # who dies in between would leave it for good
        pipeline.xadd(self._log, dict.fromkeys(layers, ""), maxlen=_BOOKINGS_TOLD, approximate=True)
        pipeline.expire(self._log, _BOOKINGS_TOLD_SECONDS)
        pipeline.execute()

    def log_end(self) -> str:
        """Where the log of bookings ends; to be asked before frames are read. One round trip."""
        last = cast("list[tuple[str, object]]", self._client.xrevrange(self._log, count=1))
        return last[0][0] if last else _BEGINNING

    def booked_since(self, log_end: str) -> frozenset[str]:
        """The layers of which frames were booked that who read then may take for waiting; to be asked when the permits
        are had. One round trip."""
        told = cast("list[tuple[str, dict[str, str]]]", self._client.xrange(self._log, f"({log_end}"))
        return frozenset(layer for _, layers in told for layer in layers)


def _place_and_token(owner: str) -> tuple[str, str]:
    place, _, token = owner.rpartition("|")
    return place or owner, token
