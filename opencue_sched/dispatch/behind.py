"""Frames that no pass has looked at, although they wait: others come before them, their job stands at a cap or is in
quarantine, or their cluster is cooled down.

A pass looks at the first jobs that may book something. What it leaves waiting has a verdict; what it had no turn for is
the difference to all there is, cluster by cluster. Both are from different moments, so the figure is for people.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping

import structlog
from redis.exceptions import RedisError
from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.clusters.discovery import scoped_facilities
from opencue_sched.coordination.postings import ClusterCooldown
from opencue_sched.dispatch.verdicts import VerdictLog
from opencue_sched.domain.cluster import Cluster
from opencue_sched.domain.tags import normalise_tag
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.settings import Settings
from opencue_sched.store.pending import SchemaColumns, WaitingWork, fetch_waiting_work

log = structlog.get_logger(__name__)

COUNTED_SECONDS = 15.0
"""How often they are counted, in the whole fleet of a facility scope."""
_BY_CAP = (Verdict.OVER_JOB.value, Verdict.OVER_FOLDER.value)


class FramesBehind:
    """Counts them, on behalf of all processes of the facility scope. ``clusters()`` are those there are."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        verdicts: VerdictLog,
        facts: SchemaColumns,
        clusters: Callable[[], Iterable[Cluster]],
        cooled_down: Callable[[], Iterable[ClusterCooldown]],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._verdicts = verdicts
        self._facts = facts
        self._clusters = clusters
        self._cooled_down = cooled_down
        self._count_at = 0.0

    def count_if_due(self) -> None:
        """Count them unless this or another process did a moment ago. A failure is logged."""
        now = time.monotonic()
        if now < self._count_at:
            return
        self._count_at = now + COUNTED_SECONDS
        try:
            if self._verdicts.behind_age(self._scope) >= COUNTED_SECONDS:
                self.count()
        except (SQLAlchemyError, RedisError) as error:
            log.warning("frames_behind_not_counted", error=str(error))

    def count(self) -> None:
        """Count them now. Raises SQLAlchemyError and RedisError."""
        with self._engine.connect() as connection:
            facilities = scoped_facilities(connection, self._settings)
            work = fetch_waiting_work(connection, facilities, self._facts)
        ignored = frozenset(map(normalise_tag, self._settings.scheduler.ignore_tags))
        cooled = {it.key for it in self._cooled_down()}
        judged = self._verdicts.left_waiting()
        behind = frames_behind(self._clusters(), work, judged, ignored=ignored, cooled_down=cooled)
        self._verdicts.record_behind(self._scope, behind, distinct=sum(it.frames for it in work))

    @property
    def _scope(self) -> str:
        return self._settings.scheduler.facility or ""


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
