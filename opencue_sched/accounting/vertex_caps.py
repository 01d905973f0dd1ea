"""What a vertex may have, and has: the fields of the ``acct:*`` hashes as values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from opencue_sched.accounting.keys import VertexKind, parse
from opencue_sched.domain.errors import InvalidInput

_INFINITY = float("inf")

_CAP_FIELDS = {
    VertexKind.SUBSCRIPTION: ("int_cores", "int_gpus", "burst"),
    VertexKind.FOLDER: ("int_cores", "int_gpus", "int_max_cores", "int_max_gpus"),
    VertexKind.JOB: ("int_cores", "int_gpus", "int_max_cores", "int_max_gpus"),
    VertexKind.LIMIT: ("int_running", "int_foreign", "int_max_value"),
}


@dataclass(frozen=True, slots=True)
class VertexCaps:
    """Caps and use of one vertex. Cores are whole (a cap may be the fraction of one core), None is unlimited.

    A limit counts frames: ``max_frames`` is its value less the frames of unmanaged shows (``foreign_frames``).
    """

    key: str
    kind: VertexKind
    cores: int
    gpus: int
    max_cores: float | None = None
    max_gpus: float | None = None
    frames: int = 0
    max_frames: float | None = None
    foreign_frames: int = 0

    @property
    def left_cores(self) -> float:
        return _INFINITY if self.max_cores is None else self.max_cores - self.cores

    @property
    def left_gpus(self) -> float:
        return _INFINITY if self.max_gpus is None else self.max_gpus - self.gpus

    @property
    def left_frames(self) -> float:
        return _INFINITY if self.max_frames is None else self.max_frames - self.frames


def cap_fields(key: str) -> tuple[str, ...]:
    """The hash fields ``read_caps`` wants, in its order. Raises InvalidInput for a vertex without caps."""
    ref = parse(key)
    if ref is None or ref.kind not in _CAP_FIELDS:
        raise InvalidInput(f"{key!r} is not a vertex with caps")
    return _CAP_FIELDS[ref.kind]


def read_caps(key: str, values: Sequence[str | None] | Exception) -> VertexCaps | None:
    """The caps from an HMGET of ``cap_fields(key)``; None while the vertex is not seeded, and for a spoilt one."""
    try:
        return None if isinstance(values, Exception) else _read(key, values)
    except ValueError:
        return None


def _read(key: str, values: Sequence[str | None]) -> VertexCaps | None:
    ref = parse(key)
    if ref is None or any(value is None for value in values[2:]):
        return None
    if ref.kind is VertexKind.LIMIT:
        foreign = int(values[1] or 0)
        cap = float(values[2] or 0) - foreign
        return VertexCaps(key, ref.kind, 0, 0, frames=int(values[0] or 0), max_frames=cap, foreign_frames=foreign)
    cores, gpus = int(values[0] or 0), int(values[1] or 0)
    if ref.kind is VertexKind.SUBSCRIPTION:
        return VertexCaps(key, ref.kind, cores, gpus, max_cores=float(values[2] or 0))
    return VertexCaps(key, ref.kind, cores, gpus, max_cores=_positive(values[2]), max_gpus=_positive(values[3]))


def _positive(value: str | None) -> float | None:
    """A folder or job cap: 0 and negative are unlimited."""
    number = float(value or 0)
    return number if number > 0 else None
