"""What waits for GPUs, for the passes of one process: read apart from them and seldom, for all of them.

A pass must know of GPU work that it does not gather (in cooldown, beyond its limit, of another show) before it gives
the cores beside idle GPUs away. That changes slowly, so the passes of a process share what was read last. Demand that
cannot run is no demand: nothing is kept for frames over a limit or a cap of their own.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlalchemy import Engine, Row

from opencue_sched.dispatch.gather import CoresInUse, cores_left, subscriptions
from opencue_sched.domain.cluster import Verdict, normalise_tags
from opencue_sched.domain.frames import MEM_RESERVED_MIN_KB, GpuDemand, Need, Search
from opencue_sched.store.pending import fetch_shares, fetch_waiting_work
from opencue_sched.store.schema import SchemaFacts

READ_SECONDS = 2.0
"""How old what is known may be. As long may cores stay idle for GPU work that has just started or gone."""


class GpuWaits:
    """What waits for GPUs now, as of at most two seconds ago. Thread-safe: one thread reads, the others use what is
    known."""

    def __init__(
        self,
        engine: Engine,
        facts: SchemaFacts,
        in_use: CoresInUse,
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
            waiting = fetch_waiting_work(connection, None, self._facts, gpus=True)
            rows = [row for row in waiting if row.why == Verdict.BEHIND]
            shares = fetch_shares(connection, {row.pk_show for row in rows}) if rows else ()
            connection.rollback()
        return _merged(rows, cores_left(subscriptions(shares, self._in_use))) if rows else ()


def _merged(rows: Iterable[Row[Any]], left: Mapping[str, Mapping[str, float]]) -> tuple[GpuDemand, ...]:
    """Demands of shows that may book the same there are one: what they need of a host is the same."""
    frames: defaultdict[tuple[str, Search, frozenset[str]], int] = defaultdict(int)
    for row in rows:
        open_allocs = frozenset(alloc_id for alloc_id, cores in left[row.pk_show].items() if cores >= row.least_cores)
        if open_allocs:
            frames[row.pk_facility, _search(row), open_allocs] += row.frames
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
