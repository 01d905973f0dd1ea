"""Layers that found no host rest alone, so that their cluster need not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

from opencue_sched.domain.verdicts import LayerVerdict


class LayerRest:
    """Per process. A layer that found no host is left out of the next passes of that cluster for ``seconds``.

    It keeps its place no longer than that, and not at all once a host has changed: ``rouse`` ends every rest.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[str, dict[str, tuple[float, LayerVerdict]]] = {}
        self._lock = threading.Lock()
        self._roused = 0

    @property
    def roused(self) -> int:
        """How often every rest was ended: to be read before the hosts that layers are looked up among."""
        return self._roused

    def rest(self, cluster: str, verdicts: Iterable[LayerVerdict], *, roused: int) -> None:
        """The layers of these verdicts found no host in this cluster just now.

        ``roused`` was read before they were looked up. If a host has changed since, they do not rest: another pass has
        taken note of the change already, and none would rouse them again.
        """
        until = self._clock() + self._seconds
        with self._lock:
            if self._roused != roused:
                return
            self._until.setdefault(cluster, {}).update({it.layer_id: (until, it) for it in verdicts})

    def resting(self, cluster: str) -> dict[str, LayerVerdict]:
        """The layers of a cluster that rest now, by id, each with the verdict it rests for."""
        now = self._clock()
        with self._lock:
            resting = {layer: rest for layer, rest in self._until.pop(cluster, {}).items() if rest[0] > now}
            if resting:
                self._until[cluster] = resting
            return {layer: verdict for layer, (_, verdict) in resting.items()}

    def rouse(self) -> None:
        """A host changed: every layer may try again."""
        with self._lock:
            self._roused += 1
            self._until.clear()
