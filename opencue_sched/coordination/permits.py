"""Layer permits: one pass at a time works on a layer (distributed scheduler reference, "Layer Permit").

A permit lives 2 s per frame the pass may book, at least 2 s and at most as long as a cluster claim does unless it is
prolonged; it is dropped at the end of the pass. It spares work lost to races between passes of overlapping clusters;
correctness never depends on it. The reference has no upper bound: a process that dies there in a pass over 20 frames
keeps everybody off their layer for 40 s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import redis

from opencue_sched.coordination.names import permit_key
from opencue_sched.lua_scripts import call_script

SECONDS_PER_FRAME = 2.0


class LayerPermits:
    """Permits of one namespace. ``claim_ttl``: seconds that a claim on a cluster lives unless it is prolonged."""

    def __init__(self, client: redis.Redis, namespace: str, *, claim_ttl: float) -> None:
        self._client = client
        self._namespace = namespace
        self._claim_ttl = claim_ttl

    def take(self, owner: str, frames_by_layer: Mapping[str, int]) -> frozenset[str]:
        """Layer ids granted to ``owner``, out of layer id -> frames to be looked at. One round trip.

        An owner ``place|token`` also gets what an earlier one of its place left: of a place there is one at a time.
        """
        if not frames_by_layer:
            return frozenset()
        layers = list(frames_by_layer)
        keys = [permit_key(self._namespace, layer) for layer in layers]
        lives = [min(self._claim_ttl, SECONDS_PER_FRAME * max(1, frames_by_layer[layer])) for layer in layers]
        lives_ms = [round(1000 * life) for life in lives]
        granted = call_script(self._client, "permits_take", keys, [owner, *lives_ms])
        return frozenset(layer for layer, taken in zip(layers, granted, strict=True) if taken)

    def drop(self, owner: str, layers: Iterable[str]) -> int:
        """Give back those of ``layers`` that are ``owner``'s; returns how many were."""
        keys = [permit_key(self._namespace, layer) for layer in layers]
        return int(call_script(self._client, "permits_drop", keys, [owner])) if keys else 0
