"""The work of the maintenance tasks: put right what hosts and processes that died left behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict

import redis
from sqlalchemy import Engine

from opencue_sched.coordination.leader import exclusive
from opencue_sched.coordination.names import reap_lease
from opencue_sched.farm.reaper import Reaper, drain_history, recover_depends
from opencue_sched.settings import Settings
from opencue_sched.store.jobs import forget_ended_quarantines
from opencue_sched.store.procs import UpkeepScope
from opencue_sched.store.release import cuebot_recalculates_subs, recalculate_subs
from opencue_sched.store.schema import Drained, SchemaFacts
from opencue_sched.worker import metrics

REAP_LEASE_SECONDS = 60.0
"""A reap begins nothing that late. When its process dies in it, the fleet's next is up to this much later."""


def upkeep_scope(settings: Settings, facts: SchemaFacts) -> UpkeepScope:
    """The fleet's facility; on a database made by Cuebot, managed shows alone: a Cuebot looks after the others."""
    return UpkeepScope(settings.scheduler.facility, beside_cuebot=facts.origin == "cuebot")


class Upkeep:
    """One per process, thread-safe. The next message does what a process that died in one of the methods left undone.

    ``scope`` is whose rows the reaper and the recovery touch (see ``upkeep_scope``). ``stopping`` says whether the
    process is to end: then no longer part of a reap is begun.
    """

    def __init__(
        self,
        engine: Engine,
        client: redis.Redis,
        settings: Settings,
        facts: SchemaFacts,
        reaper: Reaper,
        *,
        scope: UpkeepScope,
        stopping: Callable[[], bool],
    ) -> None:
        self._engine = engine
        self._client = client
        self._settings = settings
        self._facts = facts
        self._reaper = reaper
        self._scope = scope
        self._stopping = stopping

    def recalculate_subs(self) -> dict[str, object]:
        """Recount the subscriptions of unmanaged shows, unless a Cuebot does."""
        with self._engine.begin() as connection:
            if self._facts.origin == "cuebot" and cuebot_recalculates_subs(connection):
                return {"recalculated": False}
            recalculate_subs(connection)
        return {"recalculated": True}

    def reap(self) -> dict[str, object]:
        """Put right what hosts and processes left behind, unless another process of the fleet is at it."""
        key = reap_lease(self._settings.coordination.namespace, self._settings.scheduler.facility)
        with exclusive(self._client, key, seconds=REAP_LEASE_SECONDS) as mine:
            return self._reap() if mine else {"reaped": False}

    def _reap(self) -> dict[str, object]:
        report = self._reaper.run_once()
        metrics.record_reaped(report)
        drains = self._facts.has_frame_history_queue and not self._stopping()
        history = drain_history(self._engine) if drains else Drained()
        with self._engine.begin() as connection:
            forget_ended_quarantines(connection)
        return {
            "reaped": True,
            "history_events": history.events,
            "history_skipped": history.skipped,
            "hosts_down": len(report.hosts_down),
            "procs_released": report.procs_released,
            "frames_waiting": report.frames_waiting,
            "frames_dead": report.frames_dead,
            "deferred": report.deferred,
        }

    def recover_depends(self) -> dict[str, object]:
        """Finish what a process that died after a completion left undone."""
        only_on_success = self._settings.release.satisfy_only_on_frame_success
        recovery = recover_depends(self._engine, only_on_success, scope=self._scope)
        return {name: str(value) for name, value in asdict(recovery).items()}
