"""What a worker does when PostgreSQL notifies it: a handler for each channel of events.py.

A notification names *vertices*: counters with caps (accounting/keys.py). To *follow* a layer is to count its running
frames under the limits that it has now, because the layer got or lost a limit, or a limit counts something else now.
"""

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
"""How many layers and limits a worker keeps to follow again. Layers and limits beyond that are left to a recompute."""
MANY_LAYERS = 50
"""From this number of layers on that one call names, more of the same transaction may come with the next call: one read
of the listener's connection has up to 180 notifications."""


class Handlers:
    """The handlers of one process.

    The listener's thread calls the handler of a channel. The counters' thread makes up for what was not heard, or not
    followed: it calls ``follow_again``, ``handed_back`` and ``wake_all``.

    ``hosts`` and ``backlog`` return the feeds of the process, which are made after the handlers.
    """

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
        self._shows_with_work: set[str] = set()
        """The shows that have new work, until all their layers are named. Touched by the listener's thread alone."""
        self._to_follow: dict[str, None] = {}
        """The vertices ``bound:{layer}`` and ``limit:{id}`` of notifications since the last ``follow_again``, in their
        order; the values say nothing. Under ``_to_follow_lock``: the listener's thread adds vertices, the counters'
        thread takes them."""
        self._to_follow_lock = threading.Lock()

    def released(self, hosts: Sequence[str], procs: Sequence[str] = ()) -> None:
        """Release the deleted ``procs`` in the ledger, and wake what can use ``hosts``, which came free or changed.

        With another ``release_feed`` than our trigger, releases reach the ledger by that feed.
        """
        self._hosts().note(hosts)
        try:
            if self._settings.accounting.release_feed == "proc-trigger":
                self._ledger.release(procs)
        finally:
            # After the release in the ledger, because the pass that this leads to asks the ledger for headroom; and
            # also when the release failed, because the hosts are free in any case.
            self._waker.note(hosts)

    def caps_changed(self, vertices: Collection[str]) -> None:
        """Load the caps of vertices, and wake the shows whose work may go on now.

        Our triggers name the vertices ``sub:{show}:{alloc}``, ``folder:{id}``, ``job:{id}`` and ``limit:{id}``. As
        ``bound:{layer}`` they name a layer that got or lost a limit while its frames run: these count under other
        limits from now on.
        """
        ids = _ids_by_kind(vertices)
        # First, so that the vertices are kept whatever fails below.
        self._keep_to_follow(vertices)
        shows = {pair.partition(":")[0] for pair in ids["sub"]}
        # The backlog has the priority of a job, which is in one row with its caps: either may have changed.
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
            # Wake also when layers could not be followed: the new caps are loaded, and follow_again tries again.
            self._waker.note(shows=shows)

    def follow_again(self) -> None:
        """Follow all layers and limits of which notifications came since the last call.

        One worker of the fleet has followed them at once, but may have died or failed. If it did not, there is no
        difference to find. When following fails here, all is kept for the next call, and the error goes to the caller.
        """
        with self._to_follow_lock:
            vertices, self._to_follow = self._to_follow, {}
        ids = _ids_by_kind(vertices)
        try:
            self._follow(ids["bound"], self._limits_lacking(ids["limit"]))
        except Exception:
            self._keep_to_follow(vertices)
            raise

    def _keep_to_follow(self, vertices: Collection[str]) -> None:
        """Keep the layers and limits among these vertices for ``follow_again``, as far as there is room."""
        with self._to_follow_lock:
            for vertex in vertices:
                if vertex.startswith(("bound:", "limit:")) and len(self._to_follow) < MOST_LEFT_TO_FOLLOW:
                    self._to_follow[vertex] = None

    def _limits_lacking(self, limit_ids: Sequence[str]) -> list[str]:
        """The ids of those limits whose running frames have to be counted anew: their ledger entries do not say what
        the limit counts by now (Ledger.limits_lacking_machines)."""
        return self._ledger.limits_lacking_machines(limit_ids) if limit_ids else []

    def _follow(self, bound: Sequence[str], lacking: Sequence[str]) -> None:
        """Follow the layers ``bound`` (ids), and all layers under the limits ``lacking`` (ids)."""
        layers = {*bound, *(ask(self._engine, layers_under, lacking) if lacking else ())}
        if layers:
            follow_layers(self._engine, self._ledger, layers)

    def work_waits(self, shows: Sequence[str]) -> None:
        """Wake the shows that have new work. The commit that made the work also names its layers, on the backlog's
        channel."""
        self._shows_with_work.update(shows)
        self._waker.note(shows=shows)

    def backlog_changed(self, shows: Sequence[str] = (), jobs: Sequence[str] = (), layers: Sequence[str] = ()) -> None:
        """Have the backlog read these shows, jobs and layers again: their waiting work has changed, or what decides
        whether it is booked."""
        self._backlog().note(layers, jobs=jobs, shows=shows)
        # Once more for shows with new work: the sweep to which ``work_waits`` led may have begun before the backlog was
        # told of their layers.
        self._waker.note(shows={*shows, *self._shows_with_work})
        if len(layers) < MANY_LAYERS:
            self._shows_with_work.clear()

    def deaf(self, is_deaf: bool) -> None:
        """Tell the backlog whether this process hears notifications (``is_deaf``: it does not). While it is deaf, the
        backlog compares itself with the database more often, and at once to begin with."""
        backlog = self._backlog()
        was_deaf = backlog.deaf
        backlog.deaf = is_deaf
        if is_deaf and not was_deaf:
            backlog.missed()

    def handed_back(self, shows: Sequence[str]) -> None:
        """Do what is left to do when shows were handed back to a Cuebot: little, where our own command handed them
        back."""
        self._backlog().note(shows=shows)
        follow_handed_back(self._engine, self._ledger, age_seconds=self._settings.accounting.in_flight_age)

    def wake_all(self) -> None:
        """Wake every managed show: any may have got work, or headroom, while nobody heard."""
        self._waker.note(shows=ask(self._engine, managed_show_ids))


def _ids_by_kind(vertices: Collection[str]) -> defaultdict[str, list[str]]:
    """The ids of vertices by what stands before the first colon. An id of ``sub`` is ``{show}:{alloc}``."""
    ids = defaultdict[str, list[str]](list)
    for vertex in vertices:
        kind, _, id_ = vertex.partition(":")
        ids[kind].append(id_)
    return ids
