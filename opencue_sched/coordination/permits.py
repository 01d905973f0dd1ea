"""Layer permits: one pass at a time works on a layer (distributed scheduler reference, "Layer Permit").

A permit is a job of a board of its own, with the layer's id, and there while some pass has it. Its claim lives 2 s per
frame the pass may book, at least 2 s and at most as long as a cluster claim does unless it is prolonged; at the end of
the pass it is consumed. It spares work lost to races between passes of overlapping clusters; correctness never depends
on it. The reference has no upper bound: a process that dies there in a pass over 20 frames keeps everybody off their
layer for 40 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import redis

from opencue_sched.coordination.board_many import ManyJobs
from opencue_sched.coordination.names import permit_board

SECONDS_PER_FRAME = 2.0


class LayerPermits:
    """Permits of one namespace. ``claim_ttl``: seconds that a claim on a cluster lives unless it is prolonged.

    An owner is ``place|token``, or a token alone. Of a place there is one at a time: each also gets what an earlier one
    of its place left.
    """

    def __init__(self, client: redis.Redis, namespace: str, *, claim_ttl: float) -> None:
        self._jobs = ManyJobs(client, permit_board(namespace))
        self._claim_ttl = claim_ttl

    def take(self, owner: str, frames_by_layer: Mapping[str, int]) -> frozenset[str]:
        """Layer ids granted to ``owner``, out of layer id -> frames to be looked at. One round trip."""
        seconds = {
            layer: min(self._claim_ttl, SECONDS_PER_FRAME * max(1, frames)) for layer, frames in frames_by_layer.items()
        }
        return frozenset(self._jobs.take(*_place_and_token(owner), seconds))

    def drop(self, owner: str, layers: Iterable[str]) -> int:
        """Give back those of ``layers`` that are ``owner``'s; returns how many were. One round trip."""
        return self._jobs.consume(*_place_and_token(owner), layers)


def _place_and_token(owner: str) -> tuple[str, str]:
    place, _, token = owner.rpartition("|")
    return place or owner, token
