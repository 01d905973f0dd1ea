"""How many frames wait, and why: each once, by the verdict on its layer, or by what keeps passes from looking at it."""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from sqlalchemy import Connection, Row

from opencue_sched.dispatch.clusters import load_clusters, scoped_facilities
from opencue_sched.dispatch.verdicts import VerdictLog, most_telling
from opencue_sched.domain.clusters import Cluster, normalise_tag
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.settings import Settings
from opencue_sched.store.pending import fetch_waiting_work
from opencue_sched.store.schema import SchemaFacts

_LASTING = (Verdict.QUARANTINED.value, Verdict.OVER_JOB.value, Verdict.OVER_FOLDER.value)
"""What else keeps frames waiting changes from one moment to the next."""


def count_waiting_frames(
    connection: Connection,
    settings: Settings,
    verdicts: VerdictLog,
    facts: SchemaFacts,
    *,
    cooled_down: Collection[str],
    believed_seconds: float,
) -> Counter[str]:
    """Count the waiting frames of the facility scope, and keep the figures with the verdicts. Returns those of all
    scopes, by verdict.

    ``cooled_down`` are keys of clusters; verdicts and figures older than ``believed_seconds`` say nothing.

    Raises SQLAlchemyError, RedisError, and InvalidInput where the facility does not exist.
    """
    window = settings.accounting.limit_settle_window_seconds
    facilities = scoped_facilities(connection, settings)
    work = fetch_waiting_work(connection, facilities, facts, settle_window_seconds=window)
    clusters = load_clusters(connection, settings) if work else ()
    oldest = time.time() - believed_seconds
    said = {
        layer_id: best.verdict.verdict.value
        for layers in verdicts.of_jobs(sorted({job_id for row in work for job_id in row.jobs})).values()
        for layer_id, recorded in layers.items()
        if (best := most_telling([judged for judged in recorded if judged.at >= oldest])) is not None
    }
    ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))
    cooled_down = {key.partition("@")[0] for key in cooled_down}
    frames = waiting_by_verdict(clusters, work, said, ignored=ignored, cooled_down=cooled_down)
    verdicts.record_waiting(settings.scheduler.facility or "", frames)
    return verdicts.waiting(believed_seconds=believed_seconds).frames


def waiting_by_verdict(
    clusters: Iterable[Cluster],
    work: Iterable[Row[Any]],
    said: Mapping[str, str],
    *,
    ignored: frozenset[str] = frozenset(),
    cooled_down: Collection[str] = (),
) -> dict[str, int]:
    """The frames of ``work`` (fetch_waiting_work) by verdict; ``said``: the last one on a layer, by its id.

    Frames that no cluster reaches, because no host has such a tag, have no host; but they are not counted if their tags
    are ``ignored``, for another scheduler has them. ``cooled_down``: keys of clusters that no pass looks at now.
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
        why = ""
        if tags.isdisjoint(reached[place]):
            if tags <= ignored:
                continue
            why = Verdict.NO_HOST.value
        elif row.why in _LASTING:
            why = row.why
        elif tags.isdisjoint(looked_at[place]):
            why = Verdict.COOLED_DOWN.value
        for layer_id, waiting in zip(row.layers, row.waiting, strict=True):
            frames[why or said.get(layer_id, Verdict.BEHIND.value)] += waiting
    return dict(frames)
