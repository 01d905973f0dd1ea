"""How many frames wait, and why: each once, by the verdict on its layer, or by what keeps passes from looking at it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row

from opencue_sched.dispatch.clusters import load_clusters, scoped_facilities
from opencue_sched.dispatch.verdicts import VerdictLog, most_telling
from opencue_sched.domain.clusters import Cluster, normalise_tag, without_shard
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.settings import Settings
from opencue_sched.store.pending import fetch_waiting_work
from opencue_sched.store.schema import SchemaFacts

_LASTING = (Verdict.QUARANTINED.value, Verdict.OVER_JOB.value, Verdict.OVER_FOLDER.value)
"""What PostgreSQL says by itself and what holds for a while (``why`` of fetch_waiting_work). The other reasons there,
such as a limit without seats, change from one moment to the next: of these the verdicts of passes say more."""


def count_waiting_frames(
    connection: Connection,
    settings: Settings,
    verdicts: VerdictLog,
    facts: SchemaFacts,
    *,
    cooled_down: Collection[str],
    believed_seconds: float,
) -> Counter[str]:
    """Count the waiting frames of the facility scope by verdict, and record the counts beside the verdicts in Redis.
    Returns the frames of all facility scopes by verdict, as each scope was counted last.

    ``cooled_down`` are keys of clusters. Verdicts and counts older than ``believed_seconds`` are not used.

    Raises SQLAlchemyError, RedisError, and InvalidInput where the facility does not exist.
    """
    window = settings.accounting.limit_settle_window_seconds
    facilities = scoped_facilities(connection, settings)
    work = fetch_waiting_work(connection, facilities, facts, settle_window_seconds=window)
    clusters = load_clusters(connection, settings) if work else ()
    said = _last_verdicts(verdicts, {job_id for row in work for job_id in row.jobs}, time.time() - believed_seconds)
    ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))
    frames = waiting_by_verdict(
        clusters, work, said, ignored=ignored, cooled_down=frozenset(map(without_shard, cooled_down))
    )
    verdicts.record_waiting(settings.scheduler.facility or "", frames)
    return verdicts.waiting(believed_seconds=believed_seconds).frames


def _last_verdicts(verdicts: VerdictLog, job_ids: Collection[str], oldest: float) -> dict[str, str]:
    """The most telling of the verdicts on each layer of the jobs that were given since ``oldest`` (epoch seconds), by
    layer id."""
    said = {}
    for layers in verdicts.of_jobs(sorted(job_ids)).values():
        for layer_id, recorded in layers.items():
            best = most_telling([verdict for verdict in recorded if verdict.at >= oldest])
            if best is not None:
                said[layer_id] = best.verdict.verdict.value
    return said


def waiting_by_verdict(
    clusters: Iterable[Cluster],
    work: Iterable[Row[Any]],
    said: Mapping[str, str],
    *,
    ignored: frozenset[str] = frozenset(),
    cooled_down: Collection[str] = (),
) -> dict[str, int]:
    """How many frames of ``work`` (rows of fetch_waiting_work) wait by which verdict.

    ``said`` is the last verdict of passes on each layer, by layer id. ``cooled_down`` are the keys, without shards, of
    the clusters that no pass looks at now.

    Frames whose tags no cluster has count as NO_HOST, because no host has one of these tags. Frames all of whose tags
    are ``ignored`` are left to another scheduler, and not counted.
    """
    reached: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    looked_at: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for cluster in clusters:
        place = cluster.facility_id, cluster.show_id
        reached[place].update(cluster.tags)
        if cluster.key not in cooled_down:
            looked_at[place].update(cluster.tags)
    frames = Counter[str]()
    for row in work:
        place, tags = (row.pk_facility, row.pk_show), frozenset(row.tags.split("|"))
        why = ""  # where what follows gives no reason, the last verdict on each layer does
        if tags.isdisjoint(reached[place]):
            if tags <= ignored:
                continue
            why = Verdict.NO_HOST.value
        elif row.why in _LASTING:
            why = row.why
        elif tags.isdisjoint(looked_at[place]):
            why = Verdict.COOLED_DOWN.value
        for layer_id, waiting in zip(row.layers, row.waiting, strict=True):
            verdict = why or said.get(layer_id, Verdict.BEHIND.value)
            frames[verdict] += waiting
    return dict(frames)
