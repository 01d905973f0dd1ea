"""The sweep: find which clusters have work, and enqueue those (distributed scheduler, "ClusterFeed").

Which clusters sleep, and which worker has which, the postings say; all processes share them. Any process may sweep,
also several at once: enqueueing is idempotent. A plain sweep wakes no cluster that sleeps, except those that this
process sees with work for the first time since they had none.

Two things pause here. A *posting* sleeps until a time. A *process* naps: while every posting sleeps, its periodic
sweeps scan PostgreSQL less often ("longer naps when all sleep") and enqueue the clusters of the last scan.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter

import structlog
from sqlalchemy import Engine

from opencue_sched.clients.lua_scripts import Fence
from opencue_sched.clients.postgres import ask
from opencue_sched.coordination.postings import ClusterPostings, Enqueued
from opencue_sched.dispatch.clusters import load_clusters, scoped_facilities
from opencue_sched.domain.clusters import Cluster, ClusterKind, normalise_tag
from opencue_sched.domain.shards import Division, shard_of, shards
from opencue_sched.settings import Settings
from opencue_sched.store.hosts import tags_of_hosts
from opencue_sched.store.pending import WaitingTag, have_a_cluster, waiting_tags

log = structlog.get_logger(__name__)

NAP_SECONDS = 5.0
"""How long a process makes no scan after one that found every cluster asleep, as long as the reference naps then.

New work, freed hosts and changed caps are notified; the scan is for what no notification tells."""
_SCAN_BELIEVED_SECONDS = 1.0
"""How long sweeps for freed hosts alone use the last scan, if that found work for the hosts, instead of a new one.

On a full farm there are ten such sweeps a second; new work asks for a sweep of its own."""
_SHORTEST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.1, 0.33
"""Bounds of the pause between two wakes of one cluster for freed hosts: ten times a second at most in the long run,
three at least."""
_WOKEN_PER_SECOND = 60
"""How many clusters are woken a second for hosts that came free, as far as the two bounds above allow.

In a full farm hosts come free all the time, and each costs every cluster that could use it two passes. So where many
clusters could use a host, or there are many shards, each is woken less often."""
_WAKES_SAVED = 2
"""How many wakes for freed hosts a cluster saves, one for each whole pause for which it was due and not woken.

So where hosts come free now and then, one that does soon after another waits for no pause."""


# The awake gate: which clusters have work at all, from one scan for the whole farm.
#
# Most clusters of a show have no work at any moment; upstream asks each in turn, at a query for each cluster and round.
# One scan of the waiting layers' tags answers for all of them. It must never miss a cluster in which a pass could book
# a frame of the backlog, so it asks less of a layer than the backlog does, never more.


def without_cluster(
    awake: frozenset[WaitingTag], clusters: Iterable[Cluster], *, ignored: Collection[str]
) -> frozenset[WaitingTag]:
    """The tags out of the awake scan's answer that none of ``clusters`` has; tags that are ``ignored`` do not count."""
    reached = {(cluster.facility_id, cluster.show_id, tag) for cluster in clusters for tag in cluster.tags}
    return frozenset((facility, show, tag) for facility, show, tag in awake - reached if tag not in ignored)


def with_work(awake: frozenset[WaitingTag], clusters: Iterable[Cluster]) -> frozenset[Cluster]:
    """The clusters out of ``clusters`` that have waiting work, by the awake scan's answer
    (``store.pending.waiting_tags``)."""
    return frozenset(
        cluster
        for cluster in clusters
        if any((cluster.facility_id, cluster.show_id, tag) in awake for tag in cluster.tags)
    )


@dataclass(frozen=True, slots=True)
class SweepReport:
    """What one sweep found and enqueued."""

    send: tuple[tuple[Cluster, Enqueued], ...]
    """The postings for which the caller is to send a message."""
    clusters: dict[ClusterKind, int]
    """How many clusters of each kind there are, with work or without."""
    active: int
    """How many clusters have work."""
    sleeping: int
    """How many of the active clusters sleep in every shard that was swept."""
    scan_seconds: float | None
    """How long the awake scan took; None of a sweep that made none."""
    ask_again: float = 0.0
    """Seconds after which to sweep for the same hosts again, when the first of the clusters may be woken that were not,
    because they had been woken a moment before. 0: no need."""
    looked: bool = True
    """Whether the sweep looked where work waits: False where none of its hosts could wake a cluster of this process."""

    def summary(self) -> dict[str, object]:
        """A small JSON-able answer for the task."""
        return {"sent": len(self.send), "active": self.active, "sleeping": self.sleeping}


class Sweeper:
    """Sweeps of one process, and the clusters it keeps between them. Thread-safe.

    Each cluster has a posting for each shard that ``division`` says there is. Every worker hears of new work and of
    freed hosts, so a sweep for these covers this process's own shard only; all other sweeps cover all shards.

    ``on_reading`` is called before the clusters are read, for what else must be read anew now and then. ``waiting``
    says where work waits as far as this process knows (Backlog.waiting_tags). ``clock`` returns seconds and never goes
    back.
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
        self._lock = threading.Lock()
        """Held by a sweep from start to end. All attributes below are its own, but for those that say otherwise."""
        self._divided: Division = ()
        """The division at the last sweep."""
        self.at_caps: set[str] = set()
        """Keys of the clusters whose last pass in this process left something waiting at a cap of a folder, job or
        limit. The end of any frame, whatever its tags, may give these headroom. Passes add keys without the lock
        and sweeps discard them, one key at a time, which needs none."""
        self.clusters: frozenset[Cluster] = frozenset()
        """All clusters there are, as they were read last. Any thread may read it: a sweep replaces the whole set."""
        self._awake: frozenset[WaitingTag] = frozenset()
        """The tags for which work waits, as the last scan or the backlog said."""
        self._read_at = float("-inf")
        """The clock when the clusters were read last. reload() sets it back without the lock: the value is replaced."""
        self._read_for_new_show_at = float("-inf")
        """The clock when clusters were last read because of a show that nobody knew."""
        self._active: frozenset[Cluster] = frozenset()
        """Clusters with work, each with its shard, as they were enqueued last. are_all() reads it without the lock."""
        self._nap_until = self._scanned_at = float("-inf")
        self._due_at: dict[str, float] = {}
        """The clock from which on a cluster may be woken for a freed host again, by its key."""
        self._new_show = False
        """Whether to read the clusters again because a show that nobody knew has work."""
        self._withdraw_due = False
        """Whether the clusters or shards changed, so that postings may stand for what no longer exists."""
        self._tags_asked_at = float("-inf")
        """The clock when PostgreSQL was last asked for clusters of tags that no cluster has."""
        self._ignored = frozenset(map(normalise_tag, settings.scheduler.ignore_tags))

    def reload(self) -> None:
        """Have the next sweep read the clusters anew, without waiting for the interval."""
        self._read_at = float("-inf")

    def are_all(self, clusters: Collection[Cluster]) -> bool:
        """Whether ``clusters`` include every cluster of this process's shard that had work when it swept last."""
        own = {cluster.key for cluster in self._active if cluster.shard in ("", self._settings.instance)}
        return bool(own) and own <= {cluster.key for cluster in clusters}

    def sweep(
        self,
        *,
        wake_shows: Collection[str] = (),
        wake_hosts: Collection[str] = (),
        may_nap: bool = False,
        fence: Fence | None = None,
    ) -> SweepReport:
        """Enqueue every cluster with waiting work, and wake those for which something changed.

        Woken are the clusters of ``wake_shows``, and, when ``wake_hosts`` came free, the clusters that could use one of
        these hosts or wait ``at_caps``. For hosts a cluster is woken only so often (pause_between_wakes), but for the
        few wakes that it has saved; when one was not woken for that reason, ``ask_again`` of the report says when to
        sweep for the same hosts again. With either argument, in a divided farm only this process's shard is swept:
        hosts of another shard are its instance's.

        ``may_nap``: no notification asks for this sweep, so its scan may wait while all clusters sleep (NAP_SECONDS).
        Under ``fence`` nothing is enqueued once a later leader was elected: FencedOff is raised.
        """
        with self._lock:
            return self._sweep(frozenset(wake_shows), wake_hosts, may_nap, fence)

    def _sweep(
        self, wake_shows: frozenset[str], wake_hosts: Collection[str], may_nap: bool, fence: Fence | None
    ) -> SweepReport:
        """Do what sweep() says, under its lock, in the steps that the comments number from 0 to 5.

        A sweep for freed hosts of other shards alone returns after step 0. A sweep for freed hosts returns after step 1
        where every cluster with work was woken a moment ago.
        """
        # 0. The shards to sweep. Clusters count as woken at the start of the sweep: one that comes a pause later must
        #    find them due.
        now = self._clock()
        division = self._division()
        divided_anew = division != self._divided
        if divided_anew:
            log.info("farm_divided", shards=len(division), among=list(division))
            # All are woken once: those of a shard that grew may have hosts now.
            self._divided, self._withdraw_due, self._active = division, True, frozenset()
        notified = bool(wake_shows or wake_hosts)
        instance = self._settings.instance
        swept = shards(division) if not (notified and division) else tuple({instance}.intersection(division))
        wake_hosts = [host_id for host_id in wake_hosts if shard_of(host_id, division) in swept]
        if notified and not (swept and (wake_shows or wake_hosts)):
            return self._report((), looked=False)
        # 1. Read the clusters again when it is time to, and sooner for a show nobody knew that has work. Such shows may
        #    come one after the other, or have no cluster at all: for them no more often than active_scan_interval.
        self._new_show |= bool(wake_shows - {cluster.show_id for cluster in self.clusters})
        queue = self._settings.queue
        for_new_show = self._new_show and now >= self._read_for_new_show_at + queue.active_scan_interval
        if for_new_show or now >= self._read_at + queue.cluster_reload_interval:
            self._on_reading()
            self.clusters = ask(self._engine, load_clusters, self._settings)
            self._read_at = now
            if for_new_show:
                self._read_for_new_show_at = now
            self._new_show, self._withdraw_due = False, True
        # Where every cluster with work was woken a moment ago, these hosts wait for their turn, and cost nothing yet.
        held_for = 0.0 if wake_shows or self._withdraw_due else self._held_for(swept, now)
        if wake_hosts and held_for > 0:
            return self._report((), ask_again=held_for, looked=False)
        # 2. Which clusters have work, and which of these could use a host or headroom that came free.
        scan_seconds, freed_tags = None, frozenset[str]()
        napping = may_nap and not self._withdraw_due and self._clock() < self._nap_until
        if not napping:
            self._nap_until = float("-inf")
            # One connection at a time: the backlog may want one to say what waits.
            if wake_hosts:
                freed_tags = ask(self._engine, tags_of_hosts, wake_hosts)
            scan_seconds = self._find_waiting_tags(freed_tags, for_shows=bool(wake_shows), for_hosts=bool(wake_hosts))
            self._make_missing_clusters(freed_tags, now)
        ordered = sorted(with_work(self._awake, self.clusters), key=attrgetter("key"))
        ready = [replace(cluster, shard=shard) for cluster in ordered for shard in swept]
        active = frozenset(ready)
        at_caps = self.at_caps if wake_hosts else ()
        helped = {cluster for cluster in active if cluster.key in at_caps or not freed_tags.isdisjoint(cluster.tags)}
        pause = pause_between_wakes(len(helped) * len(shards(division)))
        due = {cluster for cluster in helped if self._due_in([cluster], now) <= 0}
        for cluster in due:
            saved = int(min(_WAKES_SAVED, -self._due_in([cluster], now) / pause))
            self._due_at[cluster.key] = now + (1 - saved) * pause
        # 3. A cluster that an operator put into the trash stays there, whatever its postings are called now. This comes
        #    before step 4, which would enqueue its new postings to be worked on.
        if self._withdraw_due:
            self._postings.keep_trashed(self._in_shards(shards(division)), fence=fence)
        # 4. Enqueue; the clusters to be woken come first, because their messages are sent in this order.
        wake = {cluster for cluster in active if cluster.show_id in wake_shows} | (active - self._active) | due
        wake_first = sorted(ready, key=lambda cluster: cluster not in wake)
        enqueued = self._postings.enqueue(wake_first, wake=wake, fence=fence)
        # After enqueue(): a sweep that fails there has woken no cluster new to it, and the next sweep must.
        not_swept = set(shards(division)).difference(swept)
        self._active = active | {cluster for cluster in self._active if cluster.shard in not_swept}
        self.at_caps.difference_update(cluster.key for cluster in due)
        if not all(posting.sleeping for posting in enqueued):
            self._nap_until = float("-inf")
        elif not napping and len(swept) == len(shards(division)):
            self._nap_until = self._clock() + NAP_SECONDS
        # 5. Take down the postings of clusters and shards that no longer exist.
        if self._withdraw_due:
            self._withdraw_gone(shards(division), fence)
        held_for = max(0.0, self._due_in(helped - due, now))
        return self._report(enqueued, scan_seconds=scan_seconds, ask_again=held_for)

    def _held_for(self, swept: Sequence[str], now: float) -> float:
        """Seconds until the first cluster with work in these shards may be woken for a freed host; 0 or less where one
        may be now, or there is none."""
        of_swept = [cluster for cluster in self._active if cluster.shard in swept]
        return self._due_in(of_swept, now)

    def _due_in(self, clusters: Collection[Cluster], now: float) -> float:
        """Seconds until the first of the clusters may be woken for a freed host; 0 or less where one may be now, or
        there is none."""
        due_at = (self._due_at.get(cluster.key, float("-inf")) for cluster in clusters)
        return min(due_at, default=float("-inf")) - now

    def _in_shards(self, shard_names: Sequence[str]) -> list[Cluster]:
        """Every cluster in every one of these shards."""
        return [replace(cluster, shard=shard) for cluster in self.clusters for shard in shard_names]

    def _withdraw_gone(self, shard_names: Sequence[str], fence: Fence | None) -> None:
        """Take down the postings of clusters that are gone, and those of all shards but these.

        A posting that is claimed stays for now: that of a gone cluster until the next call, that of a gone shard until
        its pass ends.
        """
        keys = {cluster.key for cluster in self._in_shards(shard_names)}
        gone = [uuid for key, uuid in self._postings.posted().items() if key not in keys]
        self._postings.withdraw(gone, fence=fence)
        self._withdraw_due = False

    def _find_waiting_tags(self, freed_tags: frozenset[str], *, for_shows: bool, for_hosts: bool) -> float | None:
        """Bring up to date where work waits; returns the seconds that a scan took, None when none was made."""
        began = self._clock()
        # 1. The backlog answers all sweeps but those after which the clusters are others. What no notification tells
        #    comes into the backlog by a resync; before that, no pass would know of the work either.
        if self._waiting is not None and (for_shows or for_hosts or not self._withdraw_due):
            self._awake = self._waiting()
            return None
        # 2. The scan of a moment ago answers a sweep for freed hosts alone, if it found work for these.
        believed = not (for_shows or self._withdraw_due) and began < self._scanned_at + _SCAN_BELIEVED_SECONDS
        if believed and any(
            not freed_tags.isdisjoint(cluster.tags) for cluster in with_work(self._awake, self.clusters)
        ):
            return None
        # 3. All others scan.
        self._awake = ask(
            self._engine,
            lambda connection: waiting_tags(connection, scoped_facilities(connection, self._settings)),
        )
        self._scanned_at = began
        return self._clock() - began

    def _make_missing_clusters(self, freed_tags: Collection[str], now: float) -> None:
        """Read the clusters again when a host has got a tag that work waits for and no cluster has.

        Otherwise other work would have the host until the next reading. PostgreSQL is asked at once when such a tag is
        among ``freed_tags``, and else once an active_scan_interval.
        """
        missing = without_cluster(self._awake, self.clusters, ignored=self._ignored)
        announced = any(tag in freed_tags for _, _, tag in missing)
        if not missing or not (announced or now >= self._tags_asked_at + self._settings.queue.active_scan_interval):
            return
        self._tags_asked_at = now
        if ask(self._engine, have_a_cluster, missing):
            self.clusters = ask(self._engine, load_clusters, self._settings)
            self._withdraw_due = True

    def _report(
        self,
        enqueued: Sequence[Enqueued],
        *,
        scan_seconds: float | None = None,
        ask_again: float = 0.0,
        looked: bool = True,
    ) -> SweepReport:
        """The report of a sweep that enqueued these postings, of all shards together: a cluster counts once, and as
        sleeping when it sleeps in each of its shards here."""
        active = {replace(posting.cluster, shard="") for posting in enqueued}
        awake = {replace(posting.cluster, shard="") for posting in enqueued if not posting.sleeping}
        return SweepReport(
            send=tuple((posting.cluster, posting) for posting in enqueued if posting.ticket),
            clusters=dict(Counter(cluster.kind for cluster in self.clusters)),
            active=len(active),
            sleeping=len(active - awake),
            scan_seconds=scan_seconds,
            ask_again=ask_again,
            looked=looked,
        )


def pause_between_wakes(clusters: int) -> float:
    """Seconds between two wakes of a cluster for freed hosts in the long run, where ``clusters`` clusters could use
    these. A cluster counts once for each shard."""
    return min(_LONGEST_PAUSE_SECONDS, max(_SHORTEST_PAUSE_SECONDS, clusters / _WOKEN_PER_SECOND))
