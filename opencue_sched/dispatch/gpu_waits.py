"""What waits for GPUs, for the passes of one process: read apart from them and seldom, as one statement for all.

A pass must know of GPU work that it does not gather (in cooldown, beyond its limit, of another show) before it gives
the cores beside idle GPUs away. That changes slowly, so the passes of a process share what was read last.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Engine, Row

from opencue_sched.domain.cluster import normalise_tags
from opencue_sched.domain.frames import GpuDemand, Need, Search, burst_cap
from opencue_sched.placement.planner import MEM_RESERVED_MIN_KB
from opencue_sched.store.pending import fetch_gpu_waits
from opencue_sched.store.schema import SchemaFacts

READ_SECONDS = 2.0
"""How old what is known may be. As long may cores stay idle for GPU work that has just started or gone."""

_Subscription = tuple[str, str]
"""Show id and allocation id."""


class GpuWaits:
    """What waits for GPUs now, as of at most two seconds ago. Thread-safe: one thread reads, the others use what is
    known. ``in_use`` says the whole cores booked under subscriptions."""

    def __init__(
        self,
        engine: Engine,
        facts: SchemaFacts,
        in_use: Callable[[Collection[_Subscription]], Mapping[_Subscription, int]],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._in_use = in_use
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at: float | None = None
        self._demands: tuple[GpuDemand, ...] = ()

    def demands(self) -> tuple[GpuDemand, ...]:
        """The demands; reads them if they are too old. Errors of the stores go to the caller."""
        if self._is_due() and self._lock.acquire(blocking=self._read_at is None):
            try:
                if self._is_due():
                    began = self._clock()
                    self._demands = self._read()
                    self._read_at = began
            finally:
                self._lock.release()
        return self._demands

    def _is_due(self) -> bool:
        return self._read_at is None or self._clock() - self._read_at >= READ_SECONDS

    def _read(self) -> tuple[GpuDemand, ...]:
        with self._engine.connect() as connection:
            rows = fetch_gpu_waits(connection, self._facts)
            connection.rollback()
        subscriptions = {(row.pk_show, alloc_id) for row in rows for alloc_id in row.bursts or ()}
        return _merged(rows, self._in_use(subscriptions) if subscriptions else {})


def _merged(rows: Iterable[Row[Any]], in_use: Mapping[_Subscription, int]) -> tuple[GpuDemand, ...]:
    """Demands of shows that may book the same there are one: what they need of a host is the same."""
    frames: defaultdict[tuple[str, Search, frozenset[str]], int] = defaultdict(int)
    for row in rows:
        open_allocs = frozenset(
            alloc_id
            for alloc_id, burst in (row.bursts or {}).items()
            if row.least_cores <= burst_cap(burst) - in_use.get((row.pk_show, alloc_id), 0)
        )
        if open_allocs:
            frames[row.pk_facility, _search(row), open_allocs] += int(row.frames)
    return tuple(
        GpuDemand(facility_id, search, alloc_ids, count) for (facility_id, search, alloc_ids), count in frames.items()
    )


def _search(row: Row[Any]) -> Search:
    need = Need(
        cores=row.least_cores,
        memory_kb=max(row.int_mem_min, MEM_RESERVED_MIN_KB),
        gpus=max(0, row.int_gpus_min),
        gpu_memory_kb=max(0, row.int_gpu_mem_min),
    )
    tags = tuple(sorted(normalise_tags(row.tags)))
    return Search(tags, row.str_os or None, need, row.b_threadable, row.int_cores_min, row.int_cores_max)
