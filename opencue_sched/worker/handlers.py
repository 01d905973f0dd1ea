"""What a worker does when PostgreSQL notifies it, by channel; the channels are in events.py."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

from sqlalchemy import Engine

from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.accounting.recompute import follow_layers
from opencue_sched.accounting.show_handover import follow_handed_back
from opencue_sched.clients.postgres import ask
from opencue_sched.dispatch.backlog_feed import BacklogFeed
from opencue_sched.dispatch.host_feed import HostFeed
from opencue_sched.settings import Settings
from opencue_sched.store.accounting import layers_under, managed_show_ids
from opencue_sched.store.shows import shows_under
from opencue_sched.worker.events import Waker

MOST_LEFT_TO_FOLLOW = 10_000
"""How many layers and limits are kept to be followed again; what is notified beyond that is left to a recompute."""


class Handlers:
    """The handlers of one process, called by the thread that listens."""

    def __init__(
        self,
        engine: Engine,
        settings: Settings,
        ledger: Ledger,
        waker: Waker,
        *,
        hosts: Callable[[], HostFeed],
        backlog: Callable[[], BacklogFeed],
    ) -> None:
        self._engine = engine
        self._settings = settings
        self._ledger = ledger
        self._waker = waker
        self._hosts = hosts
        self._backlog = backlog
        self._shows_with_work: frozenset[str] = frozenset()
        """Shows that have new work, whose layers were not named yet. Touched by the listener's thread alone."""
        self._to_follow: dict[str, None] = {}
        """Vertices ``bound:{id}`` and ``limit:{id}`` that were notified since they were followed again last, each once.
        Under the lock: the listener's thread adds them, the counters' thread takes them."""
        self._following = threading.Lock()

    def released(self, hosts: Sequence[str], procs: Sequence[str] = ()) -> None:
        """Take over that procs were deleted, or that only hosts changed. Where another feed than our trigger is set,
        releases reach the ledger by that feed."""
        self._hosts().note(hosts)
        try:
            if self._settings.accounting.release_feed == "proc-trigger":
                self._ledger.release(procs)
        finally:
            # After the release in the ledger, because the pass that this leads to asks the ledger for headroom; and
            # also when the release failed, because the hosts are free in any case.
            self._waker.note(hosts)

    def caps_changed(self, vertices: Collection[str]) -> None:
        """Load the caps of vertices, and wake the shows whose work may go on now. Our triggers name vertices
        ``sub:{show}:{alloc}``, ``folder:{id}``, ``job:{id}`` and ``limit:{id}``, and as ``bound:{id}`` layers that got
        or lost a limit while frames of them run, which count under other limits from now on."""
        ids = _ids_by_kind(vertices)
        # First, so that the vertices are kept whatever fails below.
        self._keep_to_follow(vertices)
        shows = {pair.partition(":")[0] for pair in ids["sub"]}
        # A job's cap comes with its priority, in one row.
        self._backlog().caps_changed(ids["job"])
        capped = [f"acct:{vertex}" for vertex in vertices if not vertex.startswith("bound:")]
        if capped:
            load_caps(self._engine, self._ledger, capped)
        if ids["folder"] or ids["job"] or ids["limit"]:
            shows |= ask(self._engine, shows_under, folders=ids["folder"], jobs=ids["job"], limits=ids["limit"])
        try:
            lacking = self._limits_lacking(ids["limit"])
            if (ids["bound"] or lacking) and self._ledger.follows_limits():
                self._follow(ids["bound"], lacking)
        finally:
            self._waker.note(shows=shows)

    def follow_again(self) -> None:
        """Follow all that was notified since the last call, although a worker of the fleet has followed it: that worker
        may have died or failed.

        Where it was followed there is no difference to find. What cannot be followed now is kept for the next call.
        """
        with self._following:
            vertices, self._to_follow = self._to_follow, {}
        ids = _ids_by_kind(vertices)
        try:
            self._follow(ids["bound"], self._limits_lacking(ids["limit"]))
        except Exception:
            self._keep_to_follow(vertices)
            raise

    def _keep_to_follow(self, vertices: Collection[str]) -> None:
        with self._following:
            for vertex in vertices:
                if vertex.startswith(("bound:", "limit:")) and len(self._to_follow) < MOST_LEFT_TO_FOLLOW:
                    self._to_follow[vertex] = None

    def _limits_lacking(self, limit_ids: Sequence[str]) -> list[str]:
        """The limits among these under which frames run whose entries lack what the limit counts by now."""
        return self._ledger.limits_lacking_machines(limit_ids) if limit_ids else []

    def _follow(self, bound: Sequence[str], lacking: Sequence[str]) -> None:
        """Have the running frames of these layers, and under these limits, counted as they are to be counted now."""
        layers = {*bound, *(ask(self._engine, layers_under, lacking) if lacking else ())}
        if layers:
            follow_layers(self._engine, self._ledger, layers)

    def work_waits(self, shows: Sequence[str]) -> None:
        """Note the shows that have new work, whose layers the backlog's channel names in the same moment."""
        self._shows_with_work = frozenset(shows)
        self._waker.note(shows=shows)

    def backlog_changed(self, shows: Sequence[str] = (), jobs: Sequence[str] = (), layers: Sequence[str] = ()) -> None:
        """Take over that waiting work changed, or something that decides on it."""
        self._backlog().note(layers, jobs=jobs, shows=shows)
        # A sweep for the show may have begun between the two notices of one commit.
        self._waker.note(shows={*shows, *self._shows_with_work})
        self._shows_with_work = frozenset()

    def deaf(self, is_deaf: bool) -> None:
        """Take over whether notifications have ceased. While this process is deaf, its backlog compares itself with the
        database more often, and at once to begin with."""
        backlog = self._backlog()
        was_deaf, backlog.deaf = backlog.deaf, is_deaf
        if is_deaf and not was_deaf:
            backlog.missed()

    def handed_back(self, shows: Sequence[str]) -> None:
        """Do what is left to do when shows were handed back to a Cuebot: little, where our own command did it."""
        self._backlog().note(shows=shows)
        follow_handed_back(self._engine, self._ledger, age_seconds=self._settings.accounting.in_flight_age)

    def wake_all(self) -> None:
        """Wake every managed show: any may have got work, or headroom, while nobody heard."""
        self._waker.note(shows=ask(self._engine, managed_show_ids))


def _ids_by_kind(vertices: Collection[str]) -> defaultdict[str, list[str]]:
    ids = defaultdict[str, list[str]](list)
    for vertex in vertices:
        kind, _, id_ = vertex.partition(":")
        ids[kind].append(id_)
    return ids
