"""Layer permits: one pass at a time works on a layer (distributed scheduler reference, "Layer Permit").

A permit is a job of a board of its own, with the layer's id, and there while some pass has it. Its claim lives 2 s
per frame the pass may book, at least 2 s and at most as long as a cluster claim does unless it is prolonged; for
what is planned it is prolonged until the commit's deadline, and at the end of the pass it is consumed. It spares
work lost to races between passes of overlapping clusters; correctness never depends on it. The reference has no
upper bound: a process that dies there in a pass over 20 frames keeps everybody off their layer for 40 s.

A pass reads frames before it asks for the permits of their layers, so it may have read frames as waiting that another
pass booked meanwhile. Each pass names the layers it booked of in a log of the fleet, and leaves out those that are
named there since it read.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, cast

import redis

from opencue_sched.clients.lua_scripts import ScriptCall, call_scripts, chunks
from opencue_sched.coordination.board import BoardScripts, JobPriority, life_ms
from opencue_sched.coordination.board_events import stream_end
from opencue_sched.coordination.keys import frame_permit, layers_booked, permit_board

JOBS_PER_CALL = 50
"""A call of so many takes Redis half a millisecond, for which all other clients wait; more are several calls."""
SECONDS_PER_FRAME = 2.0
_PAYLOAD = '{"v": 1, "details": {}, "book": null}'
"""A job of the jobboard with nothing in it."""
_BOOKINGS_KEPT = 1_000
"""More than a fleet commits while a pass reads and asks. One that asks later loses at its commit what others booked."""
_BOOKINGS_KEPT_SECONDS = 60


class LayerPermits:
    """Permits of one namespace. ``claim_ttl``: seconds that a claim on a cluster lives unless it is prolonged.

    An owner is ``place|token``. There is one owner of a place at a time: it also gets the permits that an earlier one
    of its place left.
    """

    def __init__(self, client: redis.Redis, namespace: str, *, claim_ttl: float) -> None:
        self._client = client
        self._scripts = BoardScripts(client, permit_board(namespace))
        self._log = layers_booked(namespace)
        self._claim_ttl = claim_ttl

    def take(self, frames_by_layer: Mapping[str, Mapping[str, int]], *, seconds: float | None = None) -> frozenset[str]:
        """Layer ids granted, out of owner -> layer id -> frames to be looked at. One round trip.

        They are the owner's for ``seconds`` from now, where given, also if they were before.
        """
        calls, asked = [], []
        for owner, of in frames_by_layer.items():
            for chunk in chunks(list(of), JOBS_PER_CALL):
                lives = (seconds or min(self._claim_ttl, SECONDS_PER_FRAME * max(1, of[layer])) for layer in chunk)
                pairs = (it for layer, life in zip(chunk, lives, strict=True) for it in (layer, life_ms(life)))
                calls.append([owner.partition("|")[0], owner, _PAYLOAD, JobPriority.NORMAL.rank, *pairs])
                asked.append(chunk)
        answers = self._scripts.call_each("board_take_many", calls)
        return frozenset(
            layer
            for chunk, fences in zip(asked, answers, strict=True)
            for layer, fence in zip(chunk, fences, strict=True)
            if fence
        )

    def drop(self, layers: Mapping[str, Iterable[str]]) -> int:
        """Give back those of each owner's ``layers`` that are its own; returns how many were. One round trip."""
        calls = [
            (owner.partition("|")[0], owner, *chunk)
            for owner, of in layers.items()
            for chunk in chunks(list(of), JOBS_PER_CALL)
        ]
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
        return stream_end(self._client, self._log)

    def booked_since(self, log_end: str) -> frozenset[str]:
        """The layers of which frames were booked since, so that frames read then may be booked by now; call it once the
        permits are granted. One round trip."""
        told = cast("list[tuple[str, dict[str, str]]]", self._client.xrange(self._log, f"({log_end}"))
        return frozenset(layer for _, layers in told for layer in layers)


# Permits of frames: no two processes plan the same frame.

PERMITS_PER_CALL = 250
"""A call of so many takes Redis a third of a millisecond, for which all other clients wait; more are several calls."""
PlannedFrame = tuple[str, int | None]
"""The id of a frame and the version that it was read with."""


class FramePermits:
    """Permits of frames in one namespace, from plan to commit. They save work lost to races between processes that
    plan from the same backlog, and decide nothing: the commit does.

    A permit is of a frame's id and version, so one that is retried meanwhile has another, and what was committed need
    not be given back. A process that dies keeps a frame for as long as it had asked for.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def take(self, frames: Sequence[PlannedFrame], owner: str, *, seconds: float) -> frozenset[str]:
        """The ids of the frames that are the owner's for ``seconds`` from now, also of those that were before. One
        round trip."""
        answers = self._call("permits_take", frames, owner, life_ms(seconds))
        granted = (flag for chunk in answers for flag in chunk)
        return frozenset(frame_id for (frame_id, _), flag in zip(frames, granted, strict=True) if flag)

    def drop(self, frames: Sequence[PlannedFrame], owner: str) -> int:
        """Give back those of the frames that are the owner's; returns how many were. One round trip."""
        return sum(self._call("permits_drop", frames, owner))

    def _call(self, script: str, frames: Sequence[PlannedFrame], *args: str | int) -> list[Any]:
        permits = [frame_permit(self._namespace, frame_id, version) for frame_id, version in frames]
        calls = [ScriptCall(script, chunk, args) for chunk in chunks(permits, PERMITS_PER_CALL)]
        return call_scripts(self._client, calls)[0] if calls else []
