"""Layers that found no host rest alone, so that their cluster need not."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection


class LayerRest:
    """Per process. A layer that found no host is left out of the next passes of that cluster for ``seconds``.

    It keeps its place no longer than that, and not at all once a host has changed: ``rouse`` ends every rest.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._until: dict[str, dict[str, float]] = {}
        self._lock = threading.Lock()

    def rest(self, cluster: str, layers: Collection[str]) -> None:
        """These layers found no host in this cluster just now."""
        until = self._clock() + self._seconds
        with self._lock:
            self._until.setdefault(cluster, {}).update(dict.fromkeys(layers, until))

    def resting(self, cluster: str) -> list[str]:
        """The layers of a cluster that rest now."""
        now = self._clock()
        with self._lock:
            resting = {layer: until for layer, until in self._until.get(cluster, {}).items() if until > now}
            self._until[cluster] = resting
            return list(resting)

    def rouse(self) -> None:
        """A host changed: every layer may try again."""
        with self._lock:
            self._until.clear()
