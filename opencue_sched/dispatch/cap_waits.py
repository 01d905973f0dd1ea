"""Clusters that rest because work of theirs waits at a cap, and are to be roused when something ends under it.

A run that ends gives back cores of a host, which rouses the clusters that could use that host, and room under the caps
of a licence, a folder or a job, at which work of quite other tags may wait. Every process hears of every run that ends;
each keeps what its own passes wait for. Lost with the process, or full, it costs the rest of a cluster's sleep.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice

from opencue_sched.domain.farm import Snapshot
from opencue_sched.domain.reservation import smallest_need
from opencue_sched.domain.verdicts import LayerVerdict, Verdict
from opencue_sched.store.cap_room import CapKind, Capped, Room

WAITS_OF_A_CLUSTER = 20
"""Enough to be roused by most of what could; a cluster that waits at more is roused by the others' turn."""
MOST_CLUSTERS = 200
_KINDS = {
    Verdict.OVER_FOLDER: CapKind.FOLDER,
    Verdict.OVER_FOLDER_GPUS: CapKind.FOLDER,
    Verdict.OVER_JOB: CapKind.JOB,
    Verdict.OVER_JOB_GPUS: CapKind.JOB,
    Verdict.OVER_LIMIT: CapKind.LIMIT,
}


@dataclass(frozen=True, slots=True)
class CapWait:
    """What a frame has too little of: cores and GPUs of a folder or job, or a seat (of ``cores``) of a limit."""

    at: Capped
    need: Room


def waits_of(verdicts: Iterable[LayerVerdict], snapshot: Snapshot) -> Iterator[CapWait]:
    """At which caps the layers of a pass wait that had too little room under them when it began. What the counters
    refused, or a host would take more than the least for, has room by this count and waits for something else."""
    layers = {layer.id: (job, layer) for job in snapshot.jobs for layer in job.layers}
    for verdict in verdicts:
        kind = _KINDS.get(verdict.verdict)
        if kind is None or verdict.layer_id not in layers:
            continue
        job, layer = layers[verdict.layer_id]
        if kind is CapKind.LIMIT:
            full = [key for key in layer.limit_ids if key in snapshot.limits and snapshot.limits[key].left < 1]
            yield from (CapWait(Capped(kind, key), Room(1, 0)) for key in full[:1])
            continue
        of_folder = kind is CapKind.FOLDER
        caps = snapshot.folders.get(job.folder_id) if of_folder else snapshot.job_caps.get(job.id)
        least = smallest_need(layer)
        need = Room(least.cores, least.gpus)
        if caps is not None and not Room(caps.cores.left, caps.gpus.left).covers(need):
            yield CapWait(Capped(kind, job.folder_id if of_folder else job.id), need)


@dataclass(frozen=True, slots=True)
class _Waiting:
    since: float
    until: float
    waits: frozenset[CapWait]


class CapWaits:
    """Of one process. Thread-safe. Forgets what no pass has said for ``seconds``: the cluster wakes by itself then."""

    def __init__(self, seconds: float = 5.0, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._lock = threading.Lock()
        self._clusters: dict[str, _Waiting] = {}

    def note(self, cluster: str, waits: Iterable[CapWait]) -> None:
        """A pass over the cluster ended with nothing booked, and these waits."""
        now = self._clock()
        with self._lock:
            self._clusters = {key: it for key, it in self._clusters.items() if it.until > now}
            before = self._clusters.get(cluster, _Waiting(now, now, frozenset()))
            known = before.waits.union(islice(waits, WAITS_OF_A_CLUSTER - len(before.waits)))
            if known and (before.waits or len(self._clusters) < MOST_CLUSTERS):
                self._clusters[cluster] = _Waiting(before.since, now + self._seconds, known)

    def forget(self, clusters: Iterable[str]) -> None:
        """These clusters have been roused; what they still wait for, their next pass says anew."""
        with self._lock:
            for cluster in clusters:
                self._clusters.pop(cluster, None)

    def caps(self) -> frozenset[Capped]:
        """Whatever is waited at; mostly nothing."""
        with self._lock:
            return frozenset(wait.at for waiting in self._clusters.values() for wait in waiting.waits)

    def with_room(self, room: Mapping[Capped, Room]) -> frozenset[str]:
        """The clusters for which there is room now, those that have waited longest first, and no more of them than the
        room is for: who comes next would find it taken."""
        left = dict(room)
        chosen = set()
        with self._lock:
            for cluster, waiting in sorted(self._clusters.items(), key=lambda item: item[1].since):
                fits = next((it for it in waiting.waits if it.at in left and left[it.at].covers(it.need)), None)
                if fits is not None:
                    left[fits.at] = left[fits.at].less(fits.need)
                    chosen.add(cluster)
        return frozenset(chosen)
