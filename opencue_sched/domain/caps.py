"""What a booking counts under, the caps there, and the headroom they leave."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from opencue_sched.errors import InvalidInput

SEPARATORS = frozenset("|,:")
"""Characters that no id in an entry of the ledger, or in a vertex's key, may contain."""


def check_ids(*ids: str) -> None:
    """Raise InvalidInput for an id that an entry of the ledger would show as two."""
    for row_id in ids:
        if not SEPARATORS.isdisjoint(row_id):
            raise InvalidInput(f"the id {row_id!r} contains one of | , : and cannot be booked")


@dataclass(frozen=True, slots=True)
class Vertices:
    """What one booking counts under: its subscription (show, allocation), folder, job, layer, department and limits."""

    show_id: str
    alloc_id: str
    folder_id: str
    job_id: str
    layer_id: str
    dept_id: str
    limit_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Headroom:
    """A cap and what is booked under it, in whole cores or units."""

    cap: float | None
    """The most that may be booked; None is unlimited."""
    booked: int
    name: str = ""
    """What people call it."""

    @property
    def left(self) -> float:
        """How much more may be booked; infinity without a cap, never negative."""
        return float("inf") if self.cap is None else max(0.0, self.cap - self.booked)


@dataclass(frozen=True, slots=True)
class Seats:
    """A limit that counts machines, each of which holds a seat of it while frames under the limit run there."""

    holding: frozenset[str]
    """The machines that hold one: ids of hosts, and names of machines that are no host here."""
    left: float
    """How many more machines may: infinity where any number may."""
    name: str = ""
    """What people call it."""


@dataclass(frozen=True, slots=True)
class Caps:
    """Cores and GPUs of one vertex."""

    cores: Headroom
    gpus: Headroom


def cores_left(subscribed: Mapping[tuple[str, str], Caps]) -> defaultdict[str, dict[str, float]]:
    """The cores that subscriptions have left, by show and then by allocation id; of any other show none."""
    left: defaultdict[str, dict[str, float]] = defaultdict(dict)
    for (show_id, alloc_id), caps in subscribed.items():
        left[show_id][alloc_id] = caps.cores.left
    return left
