"""Layer permits: one pass at a time works on a layer (distributed scheduler reference, "Layer Permit").

A permit is a job of a board of its own, with the layer's id, and there while some pass has it. Its claim lives 2 s per
frame the pass may book, at least 2 s and at most as long as a cluster claim does unless it is prolonged; for what is
planned it is prolonged until the commit's deadline, and at the end of the pass it is consumed. It spares work lost to
races between passes of overlapping clusters; correctness never depends on it. The reference has no upper bound: a
process that dies there in a pass over 20 frames keeps everybody off their layer for 40 s.

A pass reads the frames of its layers before it asks for their permits. If another pass booked frames of a layer
meanwhile, this pass has read just those frames as waiting, and would lose them at its commit. So each pass names the
layers of which it booked frames in a log of the fleet, and leaves out the layers that are named there since it read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import cast

import redis

from opencue_sched.coordination.board import TRASH_KEPT_SECONDS, BoardScripts, life_ms
from opencue_sched.coordination.jobboard import JobPriority, encode_payload
from opencue_sched.coordination.names import BoardKeys, layers_booked, permit_board

JOBS_PER_CALL = 50
"""A call of so many takes Redis half a millisecond, for which all other clients wait; more are several calls."""
_PAYLOAD = encode_payload({}, None)
_PRIORITY = JobPriority.NORMAL


class ManyJobs:
    """Jobs of a board that are claimed many at a time, and are on the board only while they are claimed.

    Each has a uuid of the caller's choice, which is also its name. What a dead owner left is removed by later calls.
    """

    def __init__(self, client: redis.Redis, keys: BoardKeys) -> None:
        self._scripts = BoardScripts(client, keys)

    def take(self, owner: str, token: str, seconds: Mapping[str, float]) -> dict[str, int]:
        """Claim jobs, each for its seconds: uuid -> fence, of those that no other owner has. One round trip.

        There is one owner of a name at a time: it takes over what an earlier one, known by another ``token``, left. A
        claim that it has by this token already lives for its seconds from now.
        """
        first = (owner, token, _PAYLOAD, _PRIORITY.rank, round(TRASH_KEPT_SECONDS * 1000))
        chunks = _chunks(seconds)
        calls = [[*first, *(value for uuid in chunk for value in (uuid, life_ms(seconds[uuid])))] for chunk in chunks]
        fences: dict[str, int] = {}
        for chunk, answer in zip(chunks, self._scripts.call_each("board_take_many", calls), strict=True):
            fences |= {uuid: int(fence) for uuid, fence in zip(chunk, answer, strict=True) if fence}
        return fences

    def consume(self, owner: str, token: str, uuids: Iterable[str]) -> int:
        """Remove the jobs that ``owner`` took by ``token`` and no one took since; how many. One round trip."""
        calls = [(owner, token, *chunk) for chunk in _chunks(uuids)]
        return sum(int(gone) for gone in self._scripts.call_each("board_consume_many", calls))


def _chunks(uuids: Iterable[str]) -> list[list[str]]:
    listed = list(uuids)
    return [listed[start : start + JOBS_PER_CALL] for start in range(0, len(listed), JOBS_PER_CALL)]


SECONDS_PER_FRAME = 2.0
_BOOKINGS_KEPT = 1_000
"""More than a fleet commits while a pass reads and asks. One that asks later loses at its commit what others booked."""
_BOOKINGS_KEPT_SECONDS = 60
_BEGINNING = "0-0"


class LayerPermits:
    """Permits of one namespace. ``claim_ttl``: seconds that a claim on a cluster lives unless it is prolonged.

    An owner is ``place|token``, or a token alone. There is one owner of a place at a time: it also gets the permits
    that an earlier one of its place left.
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
        """Log that frames of these layers are committed; call it before permits are given back. One round trip."""
        if not layers:
            return
        pipeline = self._client.pipeline(
            transaction=True
        )  # else a process that dies in between leaves the log for good
        pipeline.xadd(self._log, dict.fromkeys(layers, ""), maxlen=_BOOKINGS_KEPT, approximate=True)
        pipeline.expire(self._log, _BOOKINGS_KEPT_SECONDS)
        pipeline.execute()

    def log_end(self) -> str:
        """Where the log of bookings ends; call it before frames are read. One round trip."""
        last = cast("list[tuple[str, object]]", self._client.xrevrange(self._log, count=1))
        return last[0][0] if last else _BEGINNING

    def booked_since(self, log_end: str) -> frozenset[str]:
        """The layers of which frames were booked since, so that frames read then may be booked by now; call it once the
        permits are granted. One round trip."""
        told = cast("list[tuple[str, dict[str, str]]]", self._client.xrange(self._log, f"({log_end}"))
        return frozenset(layer for _, layers in told for layer in layers)


def _place_and_token(owner: str) -> tuple[str, str]:
    place, _, token = owner.rpartition("|")
    return place or owner, token
