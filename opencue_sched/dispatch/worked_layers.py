"""Layers of which passes of this process booked frames a moment ago.

A pass reads the frames of its layers before it asks for their permits. A layer that another pass worked on in between
may be granted to it, but the frames it has read are just those that the other booked: it could only lose them. Of what
other processes do nothing is known here; what is lost to them costs a look, as ever.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

_REMEMBERED_SECONDS = 10.0
"""Longer than a pass takes from its reading to its permits."""


class WorkedLayers:
    """Of one process. Thread-safe. Times are those of one clock that never runs backwards."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._booked: dict[str, float] = {}

    def note(self, layers: Iterable[str], now: float) -> None:
        """Frames of these layers are booked and committed; to be told before their permits are given back."""
        with self._lock:
            self._booked = {layer: at for layer, at in self._booked.items() if at + _REMEMBERED_SECONDS > now}
            self._booked.update(dict.fromkeys(layers, now))

    def since(self, read_at: float) -> frozenset[str]:
        """The layers of which frames were booked that who read at this time may take for waiting."""
        with self._lock:
            return frozenset(layer for layer, at in self._booked.items() if at > read_at)
