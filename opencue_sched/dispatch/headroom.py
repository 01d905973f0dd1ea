"""Reads what may still be booked under every cap that a plan may meet, as the ledger counts: one round trip a pass."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from itertools import islice
from threading import Lock
from typing import Any

from sqlalchemy import Row

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import VertexCaps
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.dispatch.backlog_feed import BacklogFeed
from opencue_sched.domain.caps import Caps, Headroom, Vertices, cores_left
from opencue_sched.domain.frame_needs import MEM_RESERVED_MIN_KB, Demand, Search
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.plans import Snapshot
from opencue_sched.domain.units import CENTICORES_PER_CORE, cap_cores
from opencue_sched.placement.backlog import BacklogWork

CoresInUse = Callable[[Collection[tuple[str, str]]], Mapping[tuple[str, str], int]]
"""The cores in use under subscriptions, by show and allocation id; one that is absent has none."""
WATCHED_SECONDS = 60.0
"""How long the use of a job or folder is read by every pass after its cap was found full, or has refused a booking.
With less time, more plans find out late that a cap is still full, and must go on with other frames; with more, each
pass reads the use of more vertices for nothing."""
_MOST_JOBS = 40
"""The most jobs at the head of a show's order whose use is read before a plan. The use of other jobs is read once a
plan has taken frames of them, in a further round trip to Redis; with more jobs, more is read that no plan comes to."""

_CORES_OF_A_JOB = 25
"""How many idle cores there must be for one more job of each show to be read before a plan: a plan on few cores takes
frames of a few jobs, which are not known before the plan is made."""


class WatchedVertices:
    """Jobs and folders whose caps were full, or refused bookings of this process, a moment ago. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._until: dict[str, float] = {}
        """The clock until which each key is watched. Under ``_lock``: passes of several threads watch."""
        self._lock = Lock()

    def refused(self, vertices: Iterable[Vertices]) -> None:
        """Watch the jobs and folders of bookings that were refused, or would have been."""
        self.watch(key for of in vertices for key in (keys.job(of.job_id), keys.folder(of.folder_id)))

    def watch(self, vertices: Iterable[str]) -> None:
        """Watch vertices, by their keys: every pass reads their use for WATCHED_SECONDS from now on."""
        until = self._clock() + WATCHED_SECONDS
        with self._lock:
            self._until.update(dict.fromkeys(vertices, until))

    def keys(self) -> list[str]:
        """The keys of the vertices that are watched now."""
        now = self._clock()
        with self._lock:
            self._until = {key: until for key, until in self._until.items() if until > now}
            return list(self._until)


def subscriptions(shares: Iterable[Row[Any]], in_use: CoresInUse) -> dict[tuple[str, str], Caps]:
    """The burst and the use of each subscription (fetch_shares), by show and allocation id. A burst of 0 books nothing;
    subscriptions have no cap of GPUs."""
    bursts = {(row.show_id, row.alloc_id): max(0, cap_cores(row.burst_centicores)) for row in shares}
    used = in_use(bursts)
    return {key: Caps(Headroom(burst, used.get(key, 0)), Headroom(None, 0)) for key, burst in bursts.items()}


def read_snapshot(
    ledger: Ledger, backlog: BacklogFeed, works: Sequence[BacklogWork], watched: WatchedVertices, *, idle_cores: int
) -> Snapshot:
    """Make the snapshot that a plan of ``works`` is made from: use and burst of their subscriptions, all limits, and
    the caps of jobs and folders that are watched, or that a plan on ``idle_cores`` is sure to reach."""
    now = backlog.now()
    gpu_layers = backlog.backlog.with_gpus(now)
    shares = backlog.shares({work.clusters[0].show_id for work in works} | {layer.job.show_id for layer in gpu_layers})
    most = min(_MOST_JOBS, idle_cores // _CORES_OF_A_JOB)
    jobs = {job.id: job for work in works for job in work.first_jobs(most)}
    jobs |= {waiting.job.id: waiting.job for waiting in islice(gpu_layers, _MOST_JOBS)}
    limits = backlog.limits()
    asked = dict.fromkeys(
        (
            *(keys.subscription(share.show_id, share.alloc_id) for share in shares),
            *map(keys.job, jobs),
            *(keys.folder(job.folder_id) for job in jobs.values()),
            *map(keys.limit, limits),
            *watched.keys(),
        )
    )
    found = ledger.caps(list(asked))
    of_machines = {limit_id: (row.max_value, row.name) for limit_id, row in limits.items() if row.counts_machines}
    of_reports = {limit_id: (row.frames, row.name) for limit_id, row in limits.items() if row.frames is not None}

    def cores_in_use(pairs: Collection[tuple[str, str]]) -> dict[tuple[str, str], int]:
        used = {pair: found.get(keys.subscription(*pair)) for pair in pairs}
        return {pair: caps.cores for pair, caps in used.items() if caps is not None}

    return Snapshot(
        tuple(works),
        subscriptions(shares, cores_in_use),
        {ids[0]: _caps(caps) for ids, caps in _of_kinds(found, "job", "folder")},
        {limit_id: _limit(row, found.get(keys.limit(limit_id))) for limit_id, row in limits.items()}
        | (ledger.reported_frames(of_reports) if of_reports else {}),
        {(share.show_id, share.alloc_id): share.size_centicores / CENTICORES_PER_CORE for share in shares},
        now,
        ledger.seats(of_machines) if of_machines else {},
    )


def read_caps(ledger: Ledger, pairs: Collection[tuple[str, str]], watched: WatchedVertices) -> dict[str, Caps]:
    """Caps and use of folders and jobs, by id; ``pairs`` are the ids of a folder and a job of it.

    A folder or job that was never booked has no cap here. One that has no core left is watched from now on.
    """
    vertices = {key: None for folder_id, job_id in pairs for key in (keys.folder(folder_id), keys.job(job_id))}
    found = ledger.caps(list(vertices))
    watched.watch(key for key, caps in found.items() if _caps(caps).cores.left < 1)
    unlimited = Caps(Headroom(None, 0), Headroom(None, 0))
    return {vertex_id: unlimited for pair in pairs for vertex_id in pair} | {
        ids[0]: _caps(caps) for ids, caps in _of_kinds(found, "job", "folder")
    }


def _of_kinds(found: Mapping[str, VertexCaps], *kinds: str) -> Iterable[tuple[tuple[str, ...], VertexCaps]]:
    """The ids and the caps of the vertices of these kinds."""
    for key, caps in found.items():
        parsed = keys.parse(key)
        if parsed is not None and parsed[0].value in kinds:
            yield parsed[1], caps


def _caps(caps: VertexCaps) -> Caps:
    """The caps of a vertex as a plan has them."""
    return Caps(Headroom(caps.max_cores, caps.cores), Headroom(caps.max_gpus, caps.gpus))


def _limit(row: Row[Any], caps: VertexCaps | None) -> Headroom:
    """The headroom of a limit. Frames of unmanaged shows count as they were when its caps were loaded last.

    A limit that counts machines bounds no frames: it may be full for one host and open for another.
    """
    if row.counts_machines:
        return Headroom(None, 0, row.name)
    running = 0 if caps is None else caps.frames + caps.foreign_frames
    return Headroom(max(0, row.max_value), running, row.name)


def gpu_demands(backlog: BacklogFeed, snapshot: Snapshot) -> list[Demand]:
    """The frames that wait for GPUs and may run, by what they need: a pass must know of them before it gives the cores
    beside idle GPUs away. Frames that cannot run are no demand: nothing is kept for frames over a cap, as far as is
    known. Frames that only machines which hold a limit can start are demand for these machines."""
    left = cores_left(snapshot.subscriptions)
    frames = Counter[tuple[str, Search, frozenset[str], frozenset[str] | None]]()
    for waiting in backlog.backlog.with_gpus(snapshot.now):
        job, layer, need = waiting.job, waiting.layer, waiting.need
        above = [snapshot.caps[key] for key in (job.id, job.folder_id) if key in snapshot.caps]
        full = any(caps.cores.left < need.cores or caps.gpus.left < need.gpus for caps in above) or any(
            snapshot.limits[limit_id].left < 1 for limit_id in layer.limit_ids if limit_id in snapshot.limits
        )
        seats = [snapshot.seats[limit_id] for limit_id in layer.limit_ids if limit_id in snapshot.seats]
        held = [of_limit.holding for of_limit in seats if of_limit.left < 1]
        open_allocs = frozenset(alloc for alloc, cores in left[job.show_id].items() if cores >= need.cores)
        if open_allocs and not full and backlog.may_book(job.show_id):
            search = Search.of(job, layer, need, tuple(sorted(layer.tags)))
            only = frozenset.intersection(*held) if held else None
            frames[job.facility_id, search, open_allocs, only] += waiting.frames
    return [Demand(facility, search, allocs, count, only) for (facility, search, allocs, only), count in frames.items()]


def search_of(row: Row[Any], tags: Iterable[str]) -> Search:
    """What the frames of a row of fetch_waiting_work look for, on hosts with one of ``tags``, which are some of the
    row's."""
    need = Resources(
        cores=row.least_cores,
        memory_kb=max(row.int_mem_min, MEM_RESERVED_MIN_KB),
        gpus=max(0, row.int_gpus_min),
        gpu_memory_kb=max(0, row.int_gpu_mem_min),
    )
    return Search(tuple(sorted(tags)), row.str_os or None, need, row.b_threadable, row.int_cores_min, row.int_cores_max)
