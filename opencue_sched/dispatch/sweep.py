"""The sweep: find clusters with work, enqueue them, and say for which a message should be sent.

Any process may sweep, also several at once: enqueueing is idempotent. A plain sweep does not wake clusters that rest,
except those that this process sees with work for the first time since they had none. While every cluster rests the
periodic sweeps scan PostgreSQL less often ("longer naps when all sleep") and enqueue the clusters of the last scan.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Collection
from dataclasses import dataclass

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.coordination.postings import ClusterPostings, Enqueued
from opencue_sched.dispatch.clusters import ClusterFeed, load_clusters, scan_awake, scoped_facilities
from opencue_sched.dispatch.cooldown import CapWaits
from opencue_sched.domain.cluster import Cluster, ClusterKind, Fence
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import tags_of_hosts
from opencue_sched.store.pending import fetch_headroom

log = structlog.get_logger(__name__)

_NOTHING = (frozenset[str](), frozenset[str]())
NAP_SECONDS = 5.0
"""How long a process does without an awake scan when its last one found every cluster at rest, as long as the reference
naps then. New work, freed hosts and changed caps are notified; the scan is for what no notification tells."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 0.25
_WOKEN_PER_SECOND = 100
"""In a full farm hosts come free all the time, and each costs every cluster that could use it two passes: a cluster is
woken for them ten times a second at most, and where many clusters could use them less often, at least four times."""
_COUNTING_SHARE = 0.1
"""The headroom under caps is counted from what runs, which can be much: for at most this share of a process's time."""


@dataclass(frozen=True, slots=True)
class SweepReport:
    """``send`` are the postings to send a message for; ``active`` clusters have work, ``sleeping`` of these rest."""

    send: tuple[tuple[Cluster, Enqueued], ...]
    clusters: dict[ClusterKind, int]
    active: int
    sleeping: int
    active_tags: int
    scan_seconds: float | None
    """None of a sweep that did without an awake scan, because every cluster rested."""
    ask_again: float = 0.0
    """Seconds after which to sweep for the same hosts again, because some cluster was woken for one a moment ago; 0:
    no need."""

    def summary(self) -> dict[str, object]:
        """A small JSON-able answer for the task."""
        return {"sent": len(self.send), "active": self.active, "sleeping": self.sleeping}


class Sweeper:
    """Sweeps of one process: it keeps the cluster set between them."""

    def __init__(self, engine: Engine, settings: Settings, postings: ClusterPostings) -> None:
        self._engine = engine
        self._settings = settings
        self._postings = postings
        self.cap_waits = CapWaits(settings.queue.cluster_saturated_sleep)
        self._feed = ClusterFeed(self._load, settings.queue)
        self._active: frozenset[Cluster] = frozenset()
        self._nap_until = float("-inf")
        self._count_after = float("-inf")
        self._uncounted = False
        self._shows: frozenset[str] = frozenset()
        self._woken_at: dict[str, float] = {}
        self._reload_after = 0.0
        self._reload_wanted = False
        self._withdraw_due = False
        self._lock = threading.Lock()

    def _load(self) -> frozenset[Cluster]:
        with self._engine.connect() as connection:
            return load_clusters(connection, self._settings)

    def reload(self) -> None:
        """Read the clusters anew now, without waiting for the interval."""
        with self._lock:
            self._withdraw_due |= self._feed.reload()

    def sweep(
        self,
        *,
        wake_shows: Collection[str] = (),
        wake_hosts: Collection[str] = (),
        may_nap: bool = False,
        fence: Fence | None = None,
    ) -> SweepReport:
        """Enqueue every cluster with waiting work; under ``fence``, none once a later leader was elected (FencedOff).

        Wakes the clusters of ``wake_shows``, and those that could use one of ``wake_hosts`` or wait at a cap under
        which a run that ended there made headroom; the latter only so often (see pause_between_wakes). The report says
        when that held a cluster back: then sweep for the same hosts again.
        ``may_nap``: no notification asks for this sweep, so its scan may wait while all clusters rest (NAP_SECONDS).
        """
        with self._lock:
            return self._sweep(frozenset(wake_shows), wake_hosts, may_nap, fence)

    def _sweep(
        self, wake_shows: frozenset[str], wake_hosts: Collection[str], may_nap: bool, fence: Fence | None
    ) -> SweepReport:
        self._withdraw_due |= self._reload(wake_shows)
        napping = may_nap and not self._withdraw_due and time.monotonic() < self._nap_until
        (freed_tags, with_headroom), scanned = (_NOTHING, None) if napping else self._scan(wake_hosts)
        ready = self._feed.ready()
        active = frozenset(ready)
        wake = {c for c in active if c.show_id in wake_shows} | (active - self._active)
        reaching = {c for c in active if c.key in with_headroom or not freed_tags.isdisjoint(c.tags)}
        pause = pause_between_wakes(len(reaching))
        due = self._due(reaching, pause)
        wake |= due
        # Those to be woken first: their messages are sent in this order.
        enqueued = self._postings.enqueue(sorted(ready, key=lambda c: c not in wake), wake=wake, fence=fence)
        # Not before: a sweep that fails here has woken no cluster, and the next one must.
        self._active = active
        self.cap_waits.forget(cluster.key for cluster in due)
        sleeping = sum(it.resting for it in enqueued)
        if sleeping < len(enqueued):
            self._nap_until = float("-inf")
        elif not napping:
            self._nap_until = time.monotonic() + NAP_SECONDS
        if self._withdraw_due:
            self._withdraw(fence)
            self._withdraw_due = False
        return SweepReport(
            send=tuple((it.cluster, it) for it in enqueued if it.send),
            clusters=self._feed.by_kind(),
            active=len(active),
            sleeping=sleeping,
            active_tags=self._feed.active_tags(),
            scan_seconds=scanned,
            ask_again=pause if due != reaching or (wake_hosts and self._uncounted) else 0.0,
        )

    def _scan(self, wake_hosts: Collection[str]) -> tuple[tuple[frozenset[str], frozenset[str]], float]:
        """Ask PostgreSQL which clusters have work. Returns the tags of these hosts, the clusters that wait at a cap
        which has headroom by now if any run ended, and how many seconds the scan took."""
        self._nap_until = float("-inf")
        began = time.monotonic()
        with self._engine.connect() as connection:
            awake = scan_awake(connection, scoped_facilities(connection, self._settings))
            freed_tags = tags_of_hosts(connection, wake_hosts) if wake_hosts else frozenset[str]()
            with_headroom = self._with_headroom(connection) if wake_hosts else frozenset[str]()
        self._feed.observe(awake)
        return (freed_tags, with_headroom), time.monotonic() - began

    def _with_headroom(self, connection: Connection) -> frozenset[str]:
        """The clusters that wait at a cap which has headroom by now; none, and to be asked again, so soon after the
        last count."""
        caps, began = self.cap_waits.caps(), time.monotonic()
        self._uncounted = bool(caps) and began < self._count_after
        if not caps or self._uncounted:
            return frozenset()
        headroom = fetch_headroom(connection, caps)
        ended = time.monotonic()
        self._count_after = ended + max(_SHORTEST_PAUSE_SECONDS, (ended - began) / _COUNTING_SHARE)
        return self.cap_waits.with_headroom(headroom)

    def _reload(self, wake_shows: frozenset[str]) -> bool:
        """Read the clusters when it is time to, or soon when an unknown show has work; whether they were read."""
        now = time.monotonic()
        self._reload_wanted = self._reload_wanted or bool(wake_shows - self._shows)
        if self._reload_wanted and now >= self._reload_after:
            self._reload_wanted = False
            self._reload_after = now + self._settings.queue.active_scan_interval
            read = self._feed.reload()
        else:
            read = self._feed.reload_if_due()
        self._shows = frozenset(cluster.show_id for cluster in self._feed.clusters())
        return read

    def _due(self, reaching: set[Cluster], pause: float) -> set[Cluster]:
        """Those of these clusters that were not woken for a host within ``pause`` seconds; they are now."""
        now = time.monotonic()
        due = {cluster for cluster in reaching if now - self._woken_at.get(cluster.key, float("-inf")) >= pause}
        self._woken_at.update(dict.fromkeys((cluster.key for cluster in due), now))
        return due

    def _withdraw(self, fence: Fence | None) -> None:
        """Take down the postings of clusters that no longer exist; a claimed one goes next time."""
        gone = [uuid for name, uuid in self._postings.posted().items() if self._feed.find(name) is None]
        withdrawn = self._postings.withdraw(gone, fence=fence)
        if withdrawn:
            log.info("postings_withdrawn", postings=withdrawn)


def pause_between_wakes(clusters: int) -> float:
    """Seconds for which a cluster is not woken again for a freed host that so many clusters could use."""
    return min(_LONGEST_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, clusters / _WOKEN_PER_SECOND))
