"""Ending many lost runs: in bounded transactions, one bad row never keeping the others."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from opencue_sched.release.ending import announce, database_away, end_runs
from opencue_sched.release.model import (
    EventCounts,
    HostPublisher,
    LedgerRelease,
    LostRun,
    ReleasePolicy,
    RunOutcome,
    RunVerdict,
)

_log = structlog.get_logger(__name__)

RUNS_PER_TRANSACTION = 50


@dataclass(frozen=True, slots=True)
class Releasing:
    """What it takes to end runs: the database, and whom to tell afterwards. ``asked_for``: a person has them ended, so
    that nobody need be warned."""

    engine: Engine
    policy: ReleasePolicy
    ledger: LedgerRelease | None = None
    changes: HostPublisher | None = None
    counts: EventCounts | None = None
    clock: Callable[[], float] = time.time
    asked_for: bool = False

    def end_lost(self, requests: Sequence[LostRun]) -> list[RunOutcome]:
        """End lost runs. Their processes must be known not to run. A run the database refuses is logged and kept."""
        outcomes: list[RunOutcome] = []
        for start in range(0, len(requests), RUNS_PER_TRANSACTION):
            outcomes += self._end(requests[start : start + RUNS_PER_TRANSACTION])
        return outcomes

    def _end(self, requests: Sequence[LostRun]) -> list[RunOutcome]:
        try:
            ended = end_runs(self.engine, requests, self.policy, clock=self.clock)
        except DBAPIError as error:
            if database_away(error):
                raise
            if len(requests) > 1:
                return [outcome for request in requests for outcome in self._end([request])]
            (request,) = requests
            _log.error("lost_run_refused", proc=request.proc_id, frame=request.frame_id, error=str(error.orig).strip())
            return []
        announce(ended, self.ledger, self.changes, self.counts)
        for request, outcome in zip(requests, ended.outcomes, strict=True):
            already_over = outcome.verdict is RunVerdict.STALE
            (_log.debug if already_over else _log.info if self.asked_for else _log.warning)(
                "lost_run_ended",
                proc=request.proc_id,
                frame=request.frame_id,
                reason=request.reason,
                verdict=outcome.verdict.value,
                state=outcome.state,
            )
        return list(ended.outcomes)
