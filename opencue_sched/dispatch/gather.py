"""Gather: everything the planner may know about one cluster's work, in a constant number of statements.

Limits, subscriptions, jobs, layers with frames: four statements whatever the numbers of them, and a fifth when no job
can be booked. Rows that make no sense cost their job its place in this pass and nothing else.
"""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from threading import Lock
from typing import Any

import structlog
from sqlalchemy import Connection, Row

from opencue_sched.accounting.entries import check_ids
from opencue_sched.domain.cluster import Cluster, LayerVerdict, Verdict, normalise_tags
from opencue_sched.domain.farm import BadRow, Caps, Frame, Headroom, Job, Layer, Snapshot
from opencue_sched.domain.frame_range import check_frame_range
from opencue_sched.domain.reservation import burst_cap, cores_cap, gpus_cap
from opencue_sched.domain.units import MOST_CENTICORES, MOST_GPUS, MOST_KB
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import Settings
from opencue_sched.store.pending import (
    SkippedLayers,
    fetch_limits,
    fetch_pending_jobs,
    fetch_subscriptions,
    fetch_waiting_layers,
)
from opencue_sched.store.schema import SchemaFacts

_MOST = {
    "int_cores_min": MOST_CENTICORES,
    "int_mem_min": MOST_KB,
    "int_gpus_min": MOST_GPUS,
    "int_gpu_mem_min": MOST_KB,
}
"""What a frame can ask for at most, by column; the other numbers of a layer fit into any counter."""

Skip = Callable[[Mapping[str, float]], SkippedLayers]
"""``skip(headroom)``: the layers to skip when the show's subscriptions have ``headroom`` (allocation id -> cores)."""


@dataclass(frozen=True, slots=True)
class Gathered:
    """``snapshot`` for the planner. ``bad_rows`` were skipped, and ``bad_layers`` with them; ``statements`` were sent
    to PostgreSQL. ``more``: as many jobs were found as a pass looks at, so there may be others.
    ``versions`` are those of the rows of all layers found, by id.

    ``held_back``: work waits, but all of it is over some cap or backing off; the cluster is saturated rather than
    empty, and the snapshot shows the first jobs of it.
    """

    snapshot: Snapshot
    bad_rows: tuple[BadRow, ...]
    bad_layers: tuple[LayerVerdict, ...]
    held_back: bool
    more: bool
    versions: Mapping[str, str]
    statements: int


def gather(
    connection: Connection,
    cluster: Cluster,
    settings: Settings,
    *,
    facts: SchemaFacts,
    skip: Skip = lambda _headroom: SkippedLayers(),
) -> Gathered:
    """Read the cluster's pending work and the live headroom under every cap that work stands under.

    A job all of whose layers are to be skipped gives its place to the next one.

    The caller owns the transaction; nothing is locked or changed.
    """
    limits = fetch_limits(connection)
    subscriptions = fetch_subscriptions(connection, cluster.show_id)
    subscribed = {
        row.alloc_id: Caps(Headroom(burst_cap(row.burst_centicores), row.cores), Headroom(None, row.gpus))
        for row in subscriptions
    }
    skipped = skip({alloc_id: caps.cores.left for alloc_id, caps in subscribed.items()})
    max_jobs = settings.queue.max_jobs_per_cluster_pass
    fetch_jobs = partial(
        fetch_pending_jobs,
        connection,
        cluster,
        facts,
        headroom={
            row.alloc_id: int(subscribed[row.alloc_id].cores.left)
            for row in subscriptions
            if row.facility_id == cluster.facility_id
        },
        full_limits=[limit.id for limit in limits.values() if not limit.left],
        skipped=skipped,
        max_jobs=max_jobs,
    )
    job_rows, held_back, statements = fetch_jobs(), False, 4
    if not job_rows:
        # Nothing can be booked. What is it that waits? The planner says of each layer why.
        job_rows, statements = fetch_jobs(held_back=True), 5
        held_back = bool(job_rows)
    layer_rows = fetch_waiting_layers(
        connection,
        [row.pk_job for row in job_rows],
        facts,
        tags=cluster.tags,
        skipped=skipped,
        max_frames=settings.queue.dispatch_frames_per_layer_limit,
    )
    jobs, bad_rows, bad_layers = _jobs(job_rows, layer_rows)
    kept = {job.id for job in jobs}
    wanted = limits.keys() & {limit_id for job in jobs for layer in job.layers for limit_id in layer.limit_ids}
    return Gathered(
        snapshot=Snapshot(
            jobs=tuple(jobs),
            subscriptions=subscribed,
            folders={
                row.pk_folder: _caps(row.folder_max_cores, row.folder_max_gpus, row.folder_cores, row.folder_gpus)
                for row in job_rows
                if max(row.folder_max_cores or 0, row.folder_max_gpus or 0) > 0  # no other's use is summed
            },
            job_caps={
                row.pk_job: _caps(row.int_max_cores, row.int_max_gpus, row.job_cores, row.job_gpus)
                for row in job_rows
                if row.pk_job in kept
            },
            limits={key: Headroom(limits[key].max_value, limits[key].running, limits[key].name) for key in wanted},
        ),
        bad_rows=tuple(bad_rows),
        bad_layers=tuple(bad_layers),
        held_back=held_back,
        more=not held_back and len(job_rows) >= max_jobs,
        versions={row.pk_layer: row.version for row in layer_rows},
        statements=statements,
    )


def _jobs(
    job_rows: Iterable[Row[Any]], layer_rows: Iterable[Row[Any]]
) -> tuple[list[Job], list[BadRow], list[LayerVerdict]]:
    """The jobs in the order of their rows, with their layers in the order of theirs; what makes no sense, and the
    verdicts on the layers that are not looked at for it."""
    jobs: list[Job] = []
    bad_rows: list[BadRow] = []
    bad_layers: list[LayerVerdict] = []
    layers_by_job: dict[str, list[Row[Any]]] = defaultdict(list)
    for row in layer_rows:
        if row.ids is not None:
            layers_by_job[row.pk_job].append(row)
            continue
        why = f"its counter says that {row.int_waiting_count} frames wait, and none does"
        bad_rows.append(BadRow("layer_stat", row.pk_layer, why, row.str_name))
        bad_layers.append(LayerVerdict(row.pk_job, row.pk_layer, Verdict.FAILED, 0, 0, why))
    for row in job_rows:
        layers = layers_by_job[row.pk_job]
        try:
            job = _job(row, tuple(map(_layer, layers)))
        except (InvalidInput, TypeError, ValueError, OverflowError) as error:
            why = str(error)
            bad_rows.append(BadRow("job", row.pk_job, why, row.str_name))
            bad_layers += [
                LayerVerdict(row.pk_job, layer.pk_layer, Verdict.FAILED, 0, layer.int_waiting_count, why)
                for layer in layers
            ]
            continue
        if job.layers:
            jobs.append(job)
    return jobs, bad_rows, bad_layers


def _job(row: Row[Any], layers: tuple[Layer, ...]) -> Job:
    if row.int_priority is None or row.folder_max_cores is None:
        raise InvalidInput(f"job {row.pk_job}: its row of job_resource or folder_resource is missing")
    check_ids(row.pk_job, row.pk_folder, row.pk_dept)
    return Job(
        id=row.pk_job,
        name=row.str_name,
        show_id=row.pk_show,
        show_name=row.str_show,
        facility_id=row.pk_facility,
        folder_id=row.pk_folder,
        dept_id=row.pk_dept,
        priority=row.int_priority,
        shot=row.str_shot,
        user=row.str_user,
        uid=row.int_uid,
        log_dir=row.str_log_dir or "",
        os_name=row.str_os or None,
        loki_url=row.str_loki_url or None,
        layers=layers,
    )


def _layer(row: Row[Any]) -> Layer:
    if row.int_chunk_size < 1:
        raise InvalidInput(f"layer {row.pk_layer}: int_chunk_size is {row.int_chunk_size}, it must be 1 or more")
    if not row.str_cmd.strip():
        raise InvalidInput(f"layer {row.pk_layer}: str_cmd is empty")
    for column, most in _MOST.items():
        if getattr(row, column) > most:
            raise InvalidInput(f"layer {row.pk_layer}: {column} is {getattr(row, column)}, more than there can be")
    check_frame_range(row.str_range)
    check_ids(row.pk_layer, *row.limit_ids)
    return Layer(
        id=row.pk_layer,
        name=row.str_name,
        command=row.str_cmd,
        frame_range=row.str_range,
        chunk_size=row.int_chunk_size,
        cores_min_centicores=row.int_cores_min,
        cores_max_centicores=row.int_cores_max,
        memory_min_kb=row.int_mem_min,
        gpus_min=row.int_gpus_min,
        gpu_memory_min_kb=row.int_gpu_mem_min,
        tags=normalise_tags(row.str_tags),
        services=tuple(service for part in row.str_services.split(",") if (service := part.strip())),
        threadable=row.b_threadable,
        waiting_frames=row.int_waiting_count,
        frames=tuple(map(_frame, row.ids, row.names, row.numbers, row.versions, row.waited)),
        limit_ids=tuple(sorted(row.limit_ids)),
        kind=row.kind,
    )


def _frame(frame_id: str, name: str, number: int, version: int | None, waited: float | None) -> Frame:
    # None of a frame whose dates say nothing (NULL or infinite); 0 of one that is eligible from later on.
    since = None if waited is None or not math.isfinite(waited) else max(0.0, waited)
    return Frame(frame_id, name, number, version, since)


def _caps(max_centicores: int | None, max_gpus: int | None, cores: int, gpus: int) -> Caps:
    return Caps(Headroom(cores_cap(max_centicores or 0), cores), Headroom(gpus_cap(max_gpus or 0), gpus))


# Rows that make no sense: each is logged once with its id, counted every time, and skipped.

log = structlog.get_logger(__name__)

_REMEMBERED = 10_000


class BadRowLog:
    """Logs each bad row once, however often it is met, as long as it is among the latest 10,000. Thread-safe."""

    def __init__(self) -> None:
        self._seen: OrderedDict[BadRow, None] = OrderedDict()
        self._met: Counter[str] = Counter()
        self._lock = Lock()

    def report(self, rows: Iterable[BadRow]) -> None:
        """Count these rows and log those that are new."""
        for row in rows:
            with self._lock:
                self._met[row.table] += 1
                known = row in self._seen
                self._seen[row] = None
                self._seen.move_to_end(row)
                if len(self._seen) > _REMEMBERED:
                    self._seen.popitem(last=False)
            if not known:
                log.warning(f"{row.table}_skipped", id=row.id, name=row.name, reason=row.reason)

    def taken_counts(self) -> Counter[str]:
        """How many bad rows were met since the last call, by table."""
        with self._lock:
            met, self._met = self._met, Counter()
            return met
