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

from opencue_sched.coordination.board import BoardScripts, life_ms
from opencue_sched.coordination.jobboard import JobPriority, encode_payload
from opencue_sched.coordination.names import layers_booked, permit_board

JOBS_PER_CALL = 50
"""A call of so many takes Redis half a millisecond, for which all other clients wait; more are several calls."""
SECONDS_PER_FRAME = 2.0
_PAYLOAD = encode_payload({}, None)
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
        self._scripts = BoardScripts(client, permit_board(namespace))
        self._log = layers_booked(namespace)
        self._claim_ttl = claim_ttl

    def take(self, owner: str, frames_by_layer: Mapping[str, int]) -> frozenset[str]:
        """Layer ids granted to ``owner``, out of layer id -> frames to be looked at. One round trip."""
        lives = {layer: SECONDS_PER_FRAME * max(1, frames) for layer, frames in frames_by_layer.items()}
        return self._take(owner, {layer: min(self._claim_ttl, seconds) for layer, seconds in lives.items()})

    def keep(self, owner: str, layers: Iterable[str], *, seconds: float) -> None:
        """Have those of ``layers`` that are ``owner``'s for so long from now. One round trip."""
        self._take(owner, dict.fromkeys(layers, seconds))

    def _take(self, owner: str, seconds: Mapping[str, float]) -> frozenset[str]:
        """Claim permits, each for its seconds, of which no other owner has one. One round trip."""
        first = (*_place_and_token(owner), _PAYLOAD, JobPriority.NORMAL.rank)
        chunks = _chunks(seconds)
        calls = [[*first, *(it for layer in chunk for it in (layer, life_ms(seconds[layer])))] for chunk in chunks]
        answers = self._scripts.call_each("board_take_many", calls)
        fences = [fence for answer in answers for fence in answer]
        return frozenset(layer for layer, fence in zip(seconds, fences, strict=True) if fence)

    def drop(self, owner: str, layers: Iterable[str]) -> int:
        """Give back those of ``layers`` that are ``owner``'s; returns how many were. One round trip."""
        calls = [(*_place_and_token(owner), *chunk) for chunk in _chunks(layers)]
        return sum(int(gone) for gone in self._scripts.call_each("board_consume_many", calls))

    def tell_booked(self, layers: Collection[str]) -> None:
        """Log that frames of these layers are committed; call it before permits are given back. One round trip."""
        if not layers:
            return
        # A transaction, else a process that dies in between leaves the log for good.
        with self._client.pipeline(transaction=True) as pipe:
            pipe.xadd(self._log, dict.fromkeys(layers, ""), maxlen=_BOOKINGS_KEPT, approximate=True)
            pipe.expire(self._log, _BOOKINGS_KEPT_SECONDS)
            pipe.execute()

    def log_end(self) -> str:
        """Where the log of bookings ends; call it before frames are read. One round trip."""
        last = cast("list[tuple[str, object]]", self._client.xrevrange(self._log, count=1))
        return last[0][0] if last else _BEGINNING

    def booked_since(self, log_end: str) -> frozenset[str]:
        """The layers of which frames were booked since, so that frames read then may be booked by now; call it once the
        permits are granted. One round trip."""
        told = cast("list[tuple[str, dict[str, str]]]", self._client.xrange(self._log, f"({log_end}"))
        return frozenset(layer for _, layers in told for layer in layers)


def _chunks(layers: Iterable[str]) -> list[list[str]]:
    listed = list(layers)
    return [listed[start : start + JOBS_PER_CALL] for start in range(0, len(listed), JOBS_PER_CALL)]


def _place_and_token(owner: str) -> tuple[str, str]:
    place, _, token = owner.rpartition("|")
    return place or owner, token
