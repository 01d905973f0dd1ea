"""Frames that no pass has looked at, although they wait: others come before them, or their job stands at a cap.

A pass looks at the first jobs that may book something. What it leaves waiting has a verdict; what it had no turn for is
the difference to all there is, cluster by cluster. Both are from different moments, so the figure is for people.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping

from opencue_sched.domain.cluster import Cluster
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.store.pending import WaitingWork

_BY_CAP = (Verdict.OVER_JOB.value, Verdict.OVER_FOLDER.value)


def frames_behind(
    clusters: Iterable[Cluster], work: Iterable[WaitingWork], judged: Mapping[str, Mapping[str, int]]
) -> dict[str, int]:
    """Frames by verdict that are in ``work`` and of which the last passes said nothing.

    ``judged``: cluster key -> verdict -> frames left waiting. Like those, frames are counted once for each cluster that
    reaches them: nine of a layer with the tags of two clusters are eighteen.
    """
    by_place: defaultdict[tuple[str, str], list[WaitingWork]] = defaultdict(list)
    for it in work:
        by_place[it.facility_id, it.show_id].append(it)
    frames = Counter[str]()
    for cluster in clusters:
        tags = frozenset(cluster.tags)
        there = Counter[str]()
        for it in by_place.get((cluster.facility_id, cluster.show_id), ()):
            if not tags.isdisjoint(it.tags):
                there[it.why] += it.frames
        seen = Counter[str]()
        for verdict, count in judged.get(cluster.key, {}).items():
            seen[verdict if verdict in _BY_CAP else Verdict.BEHIND.value] += count
        frames += there - seen
    return dict(frames)
