"""Gather: everything the planner may know about the work of the clusters of a pass.

Limits, subscriptions, jobs, layers with frames take four statements whatever the numbers of them and of clusters, and a
fifth when of some cluster no job can be booked. Rows that make no sense cost their job its place in this pass and
nothing else.
"""

from __future__ import annotations

import math
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, Row

from opencue_sched.accounting.keys import check_ids
from opencue_sched.clients.postgres import reading
from opencue_sched.domain.caps import Caps, Headroom, cores_left
from opencue_sched.domain.clusters import Cluster, normalise_tags
from opencue_sched.domain.frame_needs import MEM_RESERVED_MIN_KB, Demand, Search
from opencue_sched.domain.hosts import Reservation
from opencue_sched.domain.jobs import Frame, Job, Layer
from opencue_sched.domain.plans import Snapshot, Work
from opencue_sched.domain.units import CENTICORES_PER_CORE, INT_MAX, MOST_KB, cap_cores, enforced
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.errors import InvalidInput
from opencue_sched.placement.planner import MAX_FRAMES
from opencue_sched.placement.policies.order import seed_of_draw
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import log_bad_row
from opencue_sched.store.pending import (
    SkippedLayers,
    fetch_limits,
    fetch_pending_jobs,
    fetch_shares,
    fetch_waiting_layers,
    fetch_waiting_work,
)
from opencue_sched.store.schema import SchemaFacts

_MOST = {
    "int_cores_min": INT_MAX,
    "int_mem_min": MOST_KB,
    "int_gpus_min": INT_MAX,
    "int_gpu_mem_min": MOST_KB,
}
"""What a frame can ask for at most, by column; the other numbers of a layer fit into any counter."""
Skip = Callable[[Cluster, Mapping[str, float]], SkippedLayers]
"""``skip(cluster, headroom)``: its layers to skip when its show's subscriptions have ``headroom`` (allocation id ->
cores)."""
CoresInUse = Callable[[Collection[tuple[str, str]]], Mapping[tuple[str, str], int]]
"""The cores in use under subscriptions, by show and allocation id; one that is absent has none."""


@dataclass(frozen=True, slots=True)
class GatheredCluster(Work):
    """``bad_layers`` were skipped: rows of theirs, or of their job, make no sense. ``more``: as many jobs were found as
    a pass looks at, so there may be others. ``versions`` are those of the rows of all layers found, by id.

    ``held_back``: work waits, but all of it is over some cap or backing off; the cluster is saturated rather than
    empty, and the snapshot shows the first jobs of it.

    ``starts_in``: seconds until the next of its layers may start that may not yet, or the next frame that waits for the
    delay of its layer; None without one.
    """

    bad_layers: tuple[LayerVerdict, ...]
    held_back: bool
    more: bool
    versions: Mapping[str, str]
    starts_in: float | None = None


def gather(
    connection: Connection,
    clusters: Sequence[Cluster],
    settings: Settings,
    *,
    facts: SchemaFacts,
    in_use: CoresInUse,
    skip: Skip = lambda _cluster, _headroom: SkippedLayers(),
    most_frames: int = MAX_FRAMES,
) -> tuple[Snapshot, list[GatheredCluster]]:
    """Read the pending work of all these clusters, and the live headroom under every cap that work stands under: what
    the planner gets, and what else is to say of each cluster, in their order.

    ``most_frames``: as many as can be placed, and one more, which says why it is not; no more are read of a layer. A
    job all of whose layers are to be skipped gives its place to the next one. Nothing is locked or changed.
    """
    queue = settings.queue
    limits = fetch_limits(connection)
    shares = fetch_shares(connection, sorted({cluster.show_id for cluster in clusters}))
    now = next((row.now for row in shares), 0.0)
    subscribed = subscriptions(shares, in_use)
    left = cores_left(subscribed)
    places = {(cluster.show_id, cluster.facility_id) for cluster in clusters}
    skipped = [skip(cluster, left[cluster.show_id]) for cluster in clusters]
    headroom = {
        (row.show_id, row.alloc_id): int(left[row.show_id][row.alloc_id])
        for row in shares
        if (row.show_id, row.facility_id) in places
    }
    found: list[list[Row[Any]]] = [[] for _ in clusters]
    starts_in: dict[int, float] = {}

    def find_jobs(numbers: Sequence[int], *, held_back: bool = False) -> None:
        of = [clusters[number] for number in numbers]
        rows, starts = fetch_pending_jobs(
            connection,
            of,
            facts=facts,
            headroom=headroom,
            full_limits=[limit.id for limit in limits.values() if not limit.left],
            max_jobs=queue.max_jobs_per_cluster_pass,
            draws=[seed_of_draw(it.show_id, it.shard, now, queue.priority_draw) for it in of],
            skipped=[skipped[number] for number in numbers],
            uncounted=queue.uncounted_exit_statuses,
            held_back=held_back,
        )
        for row in rows:
            found[numbers[row.turn - 1]].append(row)
        starts_in.update((numbers[turn - 1], seconds) for turn, seconds in starts.items())

    find_jobs(range(len(clusters)))
    # Of clusters without a job that can be booked, what it is that waits: the planner says of each layer why.
    nothing = [number for number, rows in enumerate(found) if not rows]
    if nothing:
        find_jobs(nothing, held_back=True)
    layer_rows: defaultdict[int, list[Row[Any]]] = defaultdict(list)
    for row in fetch_waiting_layers(
        connection,
        clusters,
        [(turn + 1, row.pk_job) for turn, rows in enumerate(found) for row in rows],
        facts,
        skipped=skipped,
        max_frames=queue.dispatch_frames_per_layer_limit,
        most_frames=max(1, most_frames) if queue.whole_rounds else queue.dispatch_frames_per_layer_limit,
        uncounted=queue.uncounted_exit_statuses,
    ):
        layer_rows[row.turn - 1].append(row)
    most_jobs = queue.max_jobs_per_cluster_pass
    gathered = [
        _gathered(cluster, found[turn], layer_rows[turn], turn in nothing, most_jobs, starts_in.get(turn))
        for turn, cluster in enumerate(clusters)
    ]
    sizes = {(row.show_id, row.alloc_id): row.size_centicores / CENTICORES_PER_CORE for row in shares}
    return _snapshot(gathered, found, limits, subscribed, sizes, now), gathered


def _first_start(of_layers: float | None, layer_rows: Sequence[Row[Any]]) -> float | None:
    """Seconds until the first layer may start, or the first frame that waits for the delay of its layer; None for
    neither."""
    of_frames = [row.back_in for row in layer_rows if row.back_in is not None]
    return min([*of_frames, *([] if of_layers is None else [of_layers])], default=None)


def subscriptions(shares: Iterable[Row[Any]], in_use: CoresInUse) -> dict[tuple[str, str], Caps]:
    """Burst, of which 0 books nothing, and use of each subscription (fetch_shares), by show and allocation id. They
    have no cap of GPUs."""
    bursts = {(row.show_id, row.alloc_id): max(0, cap_cores(row.burst_centicores)) for row in shares}
    used = in_use(bursts)
    return {key: Caps(Headroom(burst, used.get(key, 0)), Headroom(None, 0)) for key, burst in bursts.items()}


def _gathered(
    cluster: Cluster,
    job_rows: Sequence[Row[Any]],
    layer_rows: Sequence[Row[Any]],
    nothing: bool,
    max_jobs: int,
    layer_starts_in: float | None,
) -> GatheredCluster:
    """The jobs in the order of their rows, with their layers in the order of theirs; ``nothing`` of these can be booked
    now, and ``max_jobs`` were asked for."""
    jobs: list[Job] = []
    bad_layers: list[LayerVerdict] = []
    layers_by_job: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in layer_rows:
        if row.ids is not None:
            layers_by_job[row.pk_job].append(row)
            continue
        if row.back_in is not None:
            continue
        why = f"its counter says that {row.int_waiting_count} frames wait, and none does"
        log_bad_row("layer_stat", row.pk_layer, row.str_name, why)
        bad_layers.append(LayerVerdict(row.pk_job, row.pk_layer, Verdict.FAILED, 0, 0, why))
    for row in job_rows:
        layers = layers_by_job[row.pk_job]
        try:
            job = _job(row, tuple(map(_layer, layers)))
        except (InvalidInput, TypeError, ValueError, OverflowError) as error:
            why = str(error)
            log_bad_row("job", row.pk_job, row.str_name, why)
            bad_layers += [
                LayerVerdict(row.pk_job, layer.pk_layer, Verdict.FAILED, 0, layer.int_waiting_count, why)
                for layer in layers
            ]
            continue
        if job.layers:
            jobs.append(job)
    return GatheredCluster(
        cluster,
        tuple(jobs),
        tuple(bad_layers),
        held_back=nothing and bool(job_rows),
        more=not nothing and len(job_rows) >= max_jobs,
        versions={row.pk_layer: row.version for row in layer_rows},
        starts_in=_first_start(layer_starts_in, layer_rows),
    )


def _snapshot(
    gathered: Sequence[GatheredCluster],
    found: Iterable[Iterable[Row[Any]]],
    limits: Mapping[str, Row[Any]],
    subscribed: Mapping[tuple[str, str], Caps],
    sizes: Mapping[tuple[str, str], float],
    now: float,
) -> Snapshot:
    """The jobs, and the caps of folders, jobs and limits above them."""
    kept = {job.id: job for it in gathered for job in it.jobs}
    wanted = {limit for job in kept.values() for layer in job.layers for limit in layer.limit_ids}
    caps = {}
    for row in (row for rows in found for row in rows):
        if row.pk_job in kept:
            caps[row.pk_job] = _caps(row.int_max_cores, row.int_max_gpus, row.job_cores, row.job_gpus)
        if max(row.folder_max_cores or 0, row.folder_max_gpus or 0) > 0:  # no other's use is summed
            of_folder = row.folder_max_cores, row.folder_max_gpus, row.folder_cores, row.folder_gpus
            caps[row.pk_folder] = _caps(*of_folder)
    above = {
        key: Headroom(limits[key].max_value, limits[key].running, limits[key].name) for key in limits.keys() & wanted
    }
    return Snapshot(tuple(gathered), subscribed, caps, above, sizes, now)


def _job(row: Row[Any], layers: tuple[Layer, ...]) -> Job:
    if row.int_priority is None or row.folder_max_cores is None:
        raise InvalidInput(f"job {row.pk_job}: its row of job_resource or folder_resource is missing")
    check_ids(row.pk_job, row.pk_folder, row.pk_dept)
    return Job(
        id=row.pk_job,
        name=row.str_name,
        show_id=row.pk_show,
        show_name=row.str_show,
        folder_id=row.pk_folder,
        dept_id=row.pk_dept,
        os_name=row.str_os or None,
        layers=layers,
    )


def _layer(row: Row[Any]) -> Layer:
    for column, most in _MOST.items():
        if getattr(row, column) > most:
            raise InvalidInput(f"layer {row.pk_layer}: {column} is {getattr(row, column)}, more than there can be")
    check_ids(row.pk_layer, *row.limit_ids)
    return Layer(
        id=row.pk_layer,
        name=row.str_name,
        cores_min_centicores=row.int_cores_min,
        cores_max_centicores=row.int_cores_max,
        memory_min_kb=row.int_mem_min,
        gpus_min=row.int_gpus_min,
        gpu_memory_min_kb=row.int_gpu_mem_min,
        tags=normalise_tags(row.str_tags),
        services=tuple(service for part in row.str_services.split(",") if (service := part.strip())),
        threadable=row.b_threadable,
        waiting_frames=row.int_waiting_count,
        frames=tuple(map(_frame, row.ids, row.names, row.numbers, row.versions, row.waited, row.memory)),
        limit_ids=tuple(sorted(row.limit_ids)),
        kind=row.kind,
        run_seconds=row.run_seconds,
    )


def _frame(
    frame_id: str, name: str, number: int, version: int | None, waited: float | None, memory_kb: int | None
) -> Frame:
    # None of a frame whose dates say nothing (NULL or infinite); 0 of one that is eligible from later on.
    since = None if waited is None or not math.isfinite(waited) else max(0.0, waited)
    return Frame(frame_id, name, number, version, since, memory_kb)


def _caps(max_centicores: int | None, max_gpus: int | None, cores: int, gpus: int) -> Caps:
    return Caps(Headroom(enforced(cap_cores(max_centicores or 0)), cores), Headroom(enforced(max_gpus), gpus))


# What waits for GPUs, for the passes of one process: read apart from them and seldom, for all of them.
#
# A pass must know of GPU work that it does not gather (in cooldown, beyond its limit, of another show) before it gives
# the cores beside idle GPUs away. That changes slowly, so the passes of a process share what was read last. Demand that
# cannot run is no demand: nothing is kept for frames over a limit or a cap of their own.

READ_SECONDS = 2.0
"""How old what is known may be. As long may cores stay idle for GPU work that has just started or gone."""


class GpuWaits:
    """What waits for GPUs now, as of at most two seconds ago. Thread-safe."""

    def __init__(
        self,
        engine: Engine,
        facts: Callable[[], SchemaFacts],
        in_use: CoresInUse,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._facts = facts
        self._in_use = in_use
        self._clock = clock
        self._lock = threading.Lock()
        self._read_at = -math.inf
        self._demands: tuple[Demand, ...] = ()

    def demands(self) -> tuple[Demand, ...]:
        """The demands; reads them if they are too old. Errors of the stores go to the caller."""
        with self._lock:
            now = self._clock()
            if now - self._read_at >= READ_SECONDS:
                self._demands = self._read()
                self._read_at = now
            return self._demands

    def _read(self) -> tuple[Demand, ...]:
        """Demands of shows that may book the same are one: what they need of a host is the same."""
        with reading(self._engine) as connection:
            waiting = fetch_waiting_work(connection, None, self._facts(), gpus=True)
            rows = [row for row in waiting if row.why == Verdict.BEHIND]
            shares = fetch_shares(connection, {row.pk_show for row in rows}) if rows else ()
        left = cores_left(subscriptions(shares, self._in_use)) if rows else {}
        frames = Counter[tuple[str, Search, frozenset[str]]]()
        for row in rows:
            open_allocs = frozenset(it for it, cores in left[row.pk_show].items() if cores >= row.least_cores)
            if open_allocs:
                frames[row.pk_facility, search_of(row, normalise_tags(row.tags)), open_allocs] += row.frames
        return tuple(
            Demand(facility_id, search, allocs, count) for (facility_id, search, allocs), count in frames.items()
        )


def search_of(row: Row[Any], tags: Iterable[str]) -> Search:
    """What frames of a row of fetch_waiting_work can use, on hosts of these of its tags."""
    need = Reservation(
        cores=row.least_cores,
        memory_kb=max(row.int_mem_min, MEM_RESERVED_MIN_KB),
        gpus=max(0, row.int_gpus_min),
        gpu_memory_kb=max(0, row.int_gpu_mem_min),
    )
    return Search(tuple(sorted(tags)), row.str_os or None, need, row.b_threadable, row.int_cores_min, row.int_cores_max)
