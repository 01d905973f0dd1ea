"""Frames that no pass has looked at, although they wait: others come before them, their job stands at a cap or is in
quarantine, or their cluster is cooled down.

A pass looks at the first jobs that may book something. What it leaves waiting has a verdict; what it had no turn for is
the difference to all there is, cluster by cluster. Both are from different moments, so the figure is for people.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping

from sqlalchemy import Engine

from opencue_sched.clusters.discovery import load_clusters, scoped_facilities
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.cluster import Cluster
from opencue_sched.domain.tags import normalise_tag
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.settings import Settings
from opencue_sched.store.pending import SchemaColumns, WaitingWork, fetch_waiting_work

_BY_CAP = (Verdict.OVER_JOB.value, Verdict.OVER_FOLDER.value)


def count_frames_behind(
    engine: Engine, settings: Settings, verdicts: VerdictLog, facts: SchemaColumns, *, cooled_down: Collection[str]
) -> None:
    """Count them in the facility scope, and keep the figures with the verdicts. ``cooled_down`` are keys of clusters.

    Raises SQLAlchemyError, RedisError, and InvalidInput where the facility does not exist.
    """
    with engine.connect() as connection:
        clusters = load_clusters(connection, settings)
        work = fetch_waiting_work(connection, scoped_facilities(connection, settings), facts)
    ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))
    behind = frames_behind(clusters, work, verdicts.left_waiting(), ignored=ignored, cooled_down=cooled_down)
    verdicts.record_behind(settings.scheduler.facility or "", behind, distinct=sum(it.frames for it in work))


def frames_behind(
    clusters: Iterable[Cluster],
    work: Iterable[WaitingWork],
    judged: Mapping[str, Mapping[str, int]],
    *,
    ignored: frozenset[str] = frozenset(),
    cooled_down: Collection[str] = (),
) -> dict[str, int]:
    """Frames by verdict that are in ``work`` and of which the last passes said nothing.

    ``judged``: cluster key -> verdict -> frames left waiting. Like those, frames are counted once for each cluster that
    reaches them: nine of a layer with the tags of two clusters are eighteen. Those that no cluster reaches, because no
    host has such a tag, have no host; but not if their tags are ``ignored``, for somebody else looks after them.
    ``cooled_down``: keys of clusters that no pass looks at now.
    """
    by_place: defaultdict[tuple[str, str], list[WaitingWork]] = defaultdict(list)
    for it in work:
        by_place[it.facility_id, it.show_id].append(it)
    frames = Counter[str]()
    reached: defaultdict[tuple[str, str], set[str]] = defaultdict(set)
    for cluster in clusters:
        reached[cluster.facility_id, cluster.show_id].update(cluster.tags)
        tags = frozenset(cluster.tags)
        there = Counter[str]()
        for it in by_place.get((cluster.facility_id, cluster.show_id), ()):
            if not tags.isdisjoint(it.tags):
                there[it.why] += it.frames
        seen = Counter[str]()
        for verdict, count in judged.get(cluster.key, {}).items():
            seen[verdict if verdict in _BY_CAP else Verdict.BEHIND.value] += count
        left = there - seen
        if cluster.key in cooled_down:
            left[Verdict.COOLED_DOWN.value] = left.pop(Verdict.BEHIND.value, 0)
        frames += left
    for place, waiting in by_place.items():
        lost = sum(it.frames for it in waiting if it.tags - ignored and it.tags.isdisjoint(reached[place]))
        frames += Counter({Verdict.NO_HOST.value: lost})
    return dict(frames)
