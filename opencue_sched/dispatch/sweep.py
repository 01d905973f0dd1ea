"""Which clusters have work, and the sweep that enqueues those (distributed scheduler,
"ClusterFeed").

Which of them sleep and who works on them is told by their postings, which all processes share. Any process may sweep,
also several at once: enqueueing is idempotent. A plain sweep does not wake clusters that sleep, except those that this
process sees with work for the first time since they had none. While every cluster sleeps the periodic sweeps scan
PostgreSQL less often ("longer naps when all sleep") and enqueue the clusters of the last scan.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import structlog
from sqlalchemy import Connection, Engine

from opencue_sched.clients.lua_scripts import Fence
from opencue_sched.clients.postgres import ask, reading
from opencue_sched.coordination.postings import ClusterPostings, Enqueued
from opencue_sched.dispatch.clusters import load_clusters, scoped_facilities
from opencue_sched.domain.clusters import Cluster, ClusterKind, normalise_tag
from opencue_sched.domain.shards import Division, shard_of, shards
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import tags_of_hosts
from opencue_sched.store.pending import WaitingTag, have_a_cluster, waiting_tags

log = structlog.get_logger(__name__)

NAP_SECONDS = 5.0
"""How long a process does without an awake scan when its last one found every cluster asleep, as long as the reference
naps then. New work, freed hosts and changed caps are notified; the scan is for what no notification tells."""
_SCAN_BELIEVED_SECONDS = 1.0
"""How long a sweep for freed hosts alone does with the last awake scan, if that found work for them: on a full farm it
is made ten times a second, and new work asks for a sweep of its own."""
_BACKLOG_BELIEVED_SECONDS = 10.0
"""How long the periodic sweeps of a process do with its backlog in place of a scan: so long the resync takes that finds
what no notification tells, and without which a pass would not know of it either."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 0.25
_WOKEN_PER_SECOND = 100
"""How many clusters are woken a second for hosts that came free, within the two pauses above. In a full farm hosts come
free all the time, and each costs every cluster that could use it two passes: a cluster is woken for them ten times a
second at most, and where many clusters could use them, or there are many shards, less often, at least four times."""


# The awake gate: which clusters have work at all, from one scan for the whole farm.
#
# Most clusters of a show are idle at any moment; asking each in turn cost upstream a query per cluster and round. One
# scan of the waiting layers' tags answers for all of them. It must never miss a cluster in which the pending-jobs query
# would find work, so it has fewer conditions than that query, never more.


def without_cluster(
    awake: frozenset[WaitingTag], clusters: Iterable[Cluster], *, ignored: Collection[str]
) -> frozenset[WaitingTag]:
    """The waiting tags, out of the awake scan's answer, that no cluster has, but for tags that are ``ignored``."""
    reached = {(cluster.facility_id, cluster.show_id, tag) for cluster in clusters for tag in cluster.tags}
    return frozenset(waiting for waiting in awake - reached if waiting[2] not in ignored)


def with_work(awake: frozenset[WaitingTag], clusters: Iterable[Cluster]) -> frozenset[Cluster]:
    """Which of ``clusters`` have waiting work, by the awake scan's answer (``store.pending.waiting_tags``)."""
    return frozenset(
        cluster
        for cluster in clusters
        if any((cluster.facility_id, cluster.show_id, tag) in awake for tag in cluster.tags)
    )


@dataclass(frozen=True, slots=True)
class SweepReport:
    """``send`` are the postings to send a message for; ``active`` clusters have work, ``sleeping`` of these sleep in
    every shard that was swept."""

    send: tuple[tuple[Cluster, Enqueued], ...]
    clusters: dict[ClusterKind, int]
    active: int
    sleeping: int
    scan_seconds: float | None
    """None of a sweep that did without an awake scan, because every cluster rested."""
    ask_again: float = 0.0
    """Seconds after which to sweep for the same hosts again, because some cluster was woken for one a moment ago; 0:
    no need."""

    def summary(self) -> dict[str, object]:
        """A small JSON-able answer for the task."""
        return {"sent": len(self.send), "active": self.active, "sleeping": self.sleeping}


class Sweeper:
    """Sweeps of one process: it keeps the cluster set between them. Thread-safe.

    Each cluster has a posting for each shard that ``division`` says there is. Every worker hears of new work and of
    freed hosts, so a sweep for these is one of this process's own shard; all others are sweeps of all shards.
    ``on_reading`` is called before the clusters are read, for what else must be read anew now and then. ``waiting``
    says where work waits as far as this process knows (Backlog.waiting_tags): sweeps for notices ask it, as do periodic
    ones, which scan PostgreSQL only so often. ``clock`` counts the seconds of its pauses and naps, and never goes back.
    """

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        postings: ClusterPostings,
        *,
        division: Callable[[], Division] = tuple,
        on_reading: Callable[[], None] = lambda: None,
        waiting: Callable[[], frozenset[WaitingTag]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._postings = postings
        self._division = division
        self._on_reading = on_reading
        self._waiting = waiting
        self._clock = clock
        self._divided: Division = ()
        self.at_caps: set[str] = set()
        """Keys of the clusters whose last pass in this process left something waiting at a cap of a folder, job or
        limit: a run of quite other tags that ends may have made headroom. Passes change it one key at a time."""
        self.clusters: frozenset[Cluster] = frozenset()
        """All there are, as they were read last."""
        self._awake: frozenset[WaitingTag] = frozenset()
        self._read_at = self._read_for_new_show_at = float("-inf")
        self._active: frozenset[Cluster] = frozenset()
        self._nap_until = self._scanned_at = float("-inf")
        self._woken_at: dict[str, float] = {}
        self._new_show = self._withdraw_due = False
        self._tags_asked_at = float("-inf")
        self._ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))
        self._lock = threading.Lock()

    def reload(self) -> None:
        """Have the next sweep read the clusters anew, without waiting for the interval."""
        self._read_at = float("-inf")

    def are_all(self, clusters: Collection[Cluster]) -> bool:
        """Whether no other cluster of this process's shard had work when it swept last."""
        mine = {cluster.key for cluster in self._active if cluster.shard in ("", self._settings.instance)}
        return bool(mine) and mine <= {cluster.key for cluster in clusters}

    def sweep(
        self,
        *,
        wake_shows: Collection[str] = (),
        wake_hosts: Collection[str] = (),
        may_nap: bool = False,
        fence: Fence | None = None,
    ) -> SweepReport:
        """Enqueue every cluster with waiting work; under ``fence``, none once a later leader was elected (FencedOff).

        Wakes the clusters of ``wake_shows``, and, when ``wake_hosts`` came free, those that could use one of them or
        wait ``at_caps``; the latter only so often (see pause_between_wakes). The report says when that held a cluster
        back: then sweep for the same hosts again. In a divided farm these are sweeps of this process's shard, and hosts
        of others are left to them.
        ``may_nap``: no notification asks for this sweep, so its scan may wait while all clusters sleep (NAP_SECONDS).
        """
        with self._lock:
            return self._sweep(frozenset(wake_shows), wake_hosts, may_nap, fence)

    def _sweep(
        self, wake_shows: frozenset[str], wake_hosts: Collection[str], may_nap: bool, fence: Fence | None
    ) -> SweepReport:
        # 0. The shards to sweep. What is woken counts as woken now: a sweep just a pause later must find it due.
        now = self._clock()
        division = self._division()
        divided_anew = division != self._divided
        if divided_anew:
            log.info("farm_divided", shards=len(division), among=list(division))
            # All are woken once: those of a shard that grew may have hosts now.
            self._divided, self._withdraw_due, self._active = division, True, frozenset()
        notified = bool(wake_shows or wake_hosts)
        mine = self._settings.instance
        swept = shards(division) if not (notified and division) else tuple({mine}.intersection(division))
        wake_hosts = [host_id for host_id in wake_hosts if shard_of(host_id, division) in swept]
        if notified and not (swept and (wake_shows or wake_hosts)):
            return self._report(())
        # 1. The clusters: again when it is time to, and at once for a show nobody knew that has work. Such shows may
        #    come one after the other, or have no cluster at all: for them no more often than active_scan_interval.
        self._new_show |= bool(wake_shows - {cluster.show_id for cluster in self.clusters})
        queue = self._settings.queue
        wanted = self._new_show and now >= self._read_for_new_show_at + queue.active_scan_interval
        if wanted or now >= self._read_at + queue.cluster_reload_interval:
            self._on_reading()
            self.clusters = ask(self._engine, load_clusters, self._settings)
            self._read_at = now
            if wanted:
                self._read_for_new_show_at = now
            self._new_show, self._withdraw_due = False, True
        # 2. Which have work, and which of these could use a host or headroom that came free.
        scanned, freed_tags = None, frozenset[str]()
        napping = may_nap and not self._withdraw_due and self._clock() < self._nap_until
        if not napping:
            self._nap_until = float("-inf")
            with reading(self._engine) as connection:
                if wake_hosts:
                    freed_tags = tags_of_hosts(connection, wake_hosts)
                began = self._clock()
                believed = not (wake_shows or self._withdraw_due) and began < self._scanned_at + _SCAN_BELIEVED_SECONDS
                awake = with_work(self._awake, self.clusters) if believed else ()
                scanned_lately = not self._withdraw_due and began < self._scanned_at + _BACKLOG_BELIEVED_SECONDS
                if self._waiting is not None and (notified or scanned_lately):
                    self._awake = self._waiting()
                elif all(freed_tags.isdisjoint(cluster.tags) for cluster in awake):
                    self._awake = waiting_tags(connection, scoped_facilities(connection, self._settings))
                    self._scanned_at = began
                    scanned = self._clock() - began
                self._make_missing_clusters(connection, freed_tags, now)
        with_some = sorted(with_work(self._awake, self.clusters), key=attrgetter("key"))
        ready = [replace(cluster, shard=shard) for cluster in with_some for shard in swept]
        active = frozenset(ready)
        at_caps = self.at_caps if wake_hosts else ()
        reaching = {c for c in active if c.key in at_caps or not freed_tags.isdisjoint(c.tags)}
        pause = pause_between_wakes(len(reaching) * len(shards(division)))
        due = {c for c in reaching if now - self._woken_at.get(c.key, float("-inf")) >= pause}
        self._woken_at.update(dict.fromkeys((cluster.key for cluster in due), now))
        # 3. A cluster that an operator put into the trash stays there, whatever its postings are called now: before
        #    they are made to be worked on.
        if self._withdraw_due:
            self._postings.keep_trashed(self._in_all(shards(division)), fence=fence)
        # 4. Enqueue, those to be woken first: their messages are sent in this order.
        wake = {c for c in active if c.show_id in wake_shows} | (active - self._active) | due
        enqueued = self._postings.enqueue(sorted(ready, key=lambda c: c not in wake), wake=wake, fence=fence)
        # Not before: a sweep that fails here has woken no cluster, and the next one must.
        self._active = active | {c for c in self._active if c.shard not in swept and c.shard in shards(division)}
        self.at_caps.difference_update(cluster.key for cluster in due)
        if not all(posting.resting for posting in enqueued):
            self._nap_until = float("-inf")
        elif not napping and len(swept) == len(shards(division)):
            self._nap_until = self._clock() + NAP_SECONDS
        # 5. Take down what no longer exists.
        if self._withdraw_due:
            self._withdraw_gone(shards(division), fence)
            self._withdraw_due = False
        return self._report(enqueued, scanned=scanned, ask_again=pause if due != reaching else 0.0)

    def _in_all(self, there: Sequence[str]) -> list[Cluster]:
        """Every cluster in every of these shards."""
        return [replace(cluster, shard=shard) for cluster in self.clusters for shard in there]

    def _withdraw_gone(self, there: Sequence[str], fence: Fence | None) -> None:
        """Take down the postings of clusters that are no more, and of other shards than these. Of postings that are
        claimed, one of a cluster goes next time, and one of a shard with the end of its pass."""
        keys = {cluster.key for cluster in self._in_all(there)}
        gone = [uuid for key, uuid in self._postings.posted().items() if key not in keys]
        self._postings.withdraw(gone, fence=fence)

    def _make_missing_clusters(self, connection: Connection, freed_tags: Collection[str], now: float) -> None:
        """Read the clusters again when a host has got a tag that work waits for and no cluster has: else other work
        would have the host until the next reading. Asked for a host that was announced with such a tag, and otherwise
        once an active_scan_interval."""
        missing = without_cluster(self._awake, self.clusters, ignored=self._ignored)
        announced = any(tag in freed_tags for _, _, tag in missing)
        if not missing or not (announced or now >= self._tags_asked_at + self._settings.queue.active_scan_interval):
            return
        self._tags_asked_at = now
        if have_a_cluster(connection, missing):
            self.clusters = load_clusters(connection, self._settings)
            self._withdraw_due = True

    def _report(
        self, enqueued: Sequence[Enqueued], *, scanned: float | None = None, ask_again: float = 0.0
    ) -> SweepReport:
        active = {replace(posting.cluster, shard="") for posting in enqueued}
        awake = {replace(posting.cluster, shard="") for posting in enqueued if not posting.resting}
        return SweepReport(
            send=tuple((posting.cluster, posting) for posting in enqueued if posting.ticket),
            clusters=dict(Counter(cluster.kind for cluster in self.clusters)),
            active=len(active),
            sleeping=len(active - awake),
            scan_seconds=scanned,
            ask_again=ask_again,
        )


def pause_between_wakes(clusters: int) -> float:
    """Seconds for which a cluster is not woken again for a freed host that so many clusters of all shards could use."""
    return min(_LONGEST_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, clusters / _WOKEN_PER_SECOND))
