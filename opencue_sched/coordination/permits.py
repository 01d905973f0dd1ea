"""Permits of frames: no two processes plan the same frame (docs/references.md).

The reference keeps a whole layer for one scheduler until a time-out. Permits of single frames have the same purpose,
and let any number of planners serve the first layer of an order. Small layers have permits as well where much is idle
(dispatch/whole_layers.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import redis

from opencue_sched.clients.lua_scripts import ScriptCall, call_scripts, chunks
from opencue_sched.coordination.board import life_ms
from opencue_sched.coordination.keys import frame_permit

PERMITS_PER_CALL = 250
"""How many permits one call asks for. It takes Redis a third of a millisecond, for which all other clients wait."""
Permitted = tuple[str, int | None]
"""The id of a frame, or of a layer, and the version that it was read with."""


class FramePermits:
    """Permits of frames in one namespace, from plan to commit. They save work lost to races between processes that
    plan from the same backlog, and decide nothing: the commit does.

    A permit is for a frame's id and version. A frame that is retried has another version, so the permit of a committed
    frame need not be given back. A process that dies keeps a frame for as long as it had asked for.
    """

    def __init__(self, client: redis.Redis, namespace: str) -> None:
        self._client = client
        self._namespace = namespace

    def take(self, frames: Sequence[Permitted], owner: str, *, seconds: float) -> frozenset[str]:
        """Take permits for ``seconds`` from now. Returns the ids of the frames that the owner has them of, also those
        that the owner had before. One round trip."""
        answers = self._call("permits_take", frames, owner, life_ms(seconds))
        granted = (flag for chunk in answers for flag in chunk)
        return frozenset(frame_id for (frame_id, _), flag in zip(frames, granted, strict=True) if flag)

    def held(self, frames: Sequence[Permitted], *, but_of: str) -> frozenset[str]:
        """The ids of the frames whose permits another owner than ``but_of`` has. One round trip."""
        permits = [frame_permit(self._namespace, frame_id, version) for frame_id, version in frames]
        owners = self._client.mget(permits) if permits else []
        return frozenset(
            frame_id for (frame_id, _), owner in zip(frames, owners, strict=True) if owner not in (None, but_of)
        )

    def drop(self, frames: Sequence[Permitted], owner: str) -> int:
        """Give back the permits that the owner has of these frames. Returns their number. One round trip."""
        return sum(self._call("permits_drop", frames, owner))

    def _call(self, script: str, frames: Sequence[Permitted], *args: str | int) -> list[Any]:
        """The script's answers for the permits of the frames, one for each PERMITS_PER_CALL of them, in one round
        trip."""
        permits = [frame_permit(self._namespace, frame_id, version) for frame_id, version in frames]
        calls = [ScriptCall(script, chunk, args) for chunk in chunks(permits, PERMITS_PER_CALL)]
        return call_scripts(self._client, calls)[0] if calls else []
