"""Everything one process has open: engine, Redis, ledger, caches, channels. Made on first use, after any fork.

The doors in ``tasks/`` call the methods here; these compose the rooms and record the metrics.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection
from functools import cached_property
from typing import Any

import structlog
from celery import Celery

from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import load_caps, make_ledger, reseed_limits
from opencue_sched.accounting.connection import make_redis
from opencue_sched.accounting.managed import ManagedShows
from opencue_sched.accounting.recompute import recompute
from opencue_sched.coordination.names import BoardKeys
from opencue_sched.coordination.permits import LayerPermits
from opencue_sched.coordination.postings import ClaimKeeper, ClusterPostings
from opencue_sched.dispatch.channels import RqdChannels
from opencue_sched.dispatch.cluster_pass import PassRunner
from opencue_sched.dispatch.commit import compensate
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.dispatch.hosts import HostFeed
from opencue_sched.dispatch.report import PassReport
from opencue_sched.dispatch.rest import LayerRest
from opencue_sched.dispatch.settle import Settlement
from opencue_sched.dispatch.sweep import Sweeper, SweepReport
from opencue_sched.operate import metrics
from opencue_sched.placement.changes import HostChanges
from opencue_sched.settings import Settings, get_settings
from opencue_sched.store.engine import make_engine
from opencue_sched.store.schema import check_schema

log = structlog.get_logger(__name__)

DISPATCH_TASK = "opencue_sched.dispatch.dispatch_cluster"
MESSAGE_LIFE_SECONDS = 60


class Runtime:
    """The collaborators of one process. Thread-safe: several tasks of a threads pool share it."""

    def __init__(self, settings: Settings, app: Celery) -> None:
        self.settings = settings
        self.app = app
        self.engine = make_engine(settings, application_name=f"opencue-sched {settings.instance}"[:63])
        self.client = make_redis(settings.redis_dsn, settings)
        self.ledger = make_ledger(self.engine, self.client, owner=settings.instance)
        self.managed = ManagedShows(self.engine, settings.accounting.managed_shows_ttl)
        self.changes = HostChanges(self.client, settings.coordination.namespace)
        self.channels = RqdChannels(settings.rqd)
        self.postings = ClusterPostings(self.client, BoardKeys(settings.coordination.namespace, self._board()))
        self.keeper = ClaimKeeper(self.postings, ttl_seconds=settings.coordination.claim_ttl)

    def _board(self) -> str:
        facility = self.settings.scheduler.facility
        return f"clusters.{facility}" if facility else "clusters"

    @cached_property
    def facts(self) -> Any:
        """What the database schema has. Raises SchemaMissing or SchemaTooOld."""
        with self.engine.connect() as connection:
            return check_schema(connection)

    @cached_property
    def hosts(self) -> HostFeed:
        return HostFeed(self.engine, self.changes, self.settings.host_cache, instance=self.settings.instance)

    @cached_property
    def sweeper(self) -> Sweeper:
        return Sweeper(self.engine, self.settings, self.postings)

    @cached_property
    def dispatcher(self) -> Dispatcher:
        runner = PassRunner(
            engine=self.engine,
            settings=self.settings,
            ledger=self.ledger,
            hosts=self.hosts,
            permits=LayerPermits(self.client, self.settings.coordination.namespace),
            settlement=Settlement(self.engine, self.ledger, self.changes, self.channels, compensate),
            facts=self.facts,
            rest=LayerRest(self.settings.queue.cluster_saturated_sleep),
        )
        return Dispatcher(self.settings, self.postings, self.keeper, runner, self.settings.instance, self.send)

    def send(self, posting: str) -> None:
        """Put a message for a posting on the dispatch queue."""
        self.app.send_task(DISPATCH_TASK, args=(posting,), expires=MESSAGE_LIFE_SECONDS)

    # What the doors call

    def sweep(self, *, wake_shows: Collection[str] = ()) -> SweepReport:
        """Post clusters with work and send their messages."""
        report = self.sweeper.sweep(wake_shows=wake_shows)
        for _, posting in report.send:
            self.send(posting)
        metrics.record_sweep(report)
        return report

    def dispatch(self, posting: str) -> PassReport | None:
        """One pass for a message."""
        report = self.dispatcher.dispatch(posting)
        if report is not None:
            metrics.record_pass(report)
            metrics.record_cache(self.hosts.cache.stats())
        return report

    def close(self) -> None:
        """Give everything back. Claims not ended expire by themselves."""
        self.keeper.stop()
        self.channels.close()
        self.client.close()
        self.engine.dispose()


_lock = threading.Lock()
_runtime: Runtime | None = None
_pid = 0


def runtime() -> Runtime:
    """The runtime of this process, made on first use and again after a fork."""
    global _runtime, _pid  # noqa: PLW0603 - one per process, by design
    with _lock:
        if _runtime is None or _pid != os.getpid():
            from opencue_sched.celery import app

            _runtime, _pid = Runtime(get_settings(), app), os.getpid()
        return _runtime


def forget_runtime() -> None:
    """Drop the parent's runtime after a fork, without closing what the parent still uses."""
    global _runtime  # noqa: PLW0603
    _runtime = None
