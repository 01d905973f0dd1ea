"""Completions: the ends of processes as their RQDs report them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog
from sqlalchemy import Engine
from sqlalchemy.exc import DBAPIError

from opencue_sched.release.ending import announce, database_away, end_runs
from opencue_sched.release.model import (
    CompletedFrame,
    CompletionOutcome,
    EventCounts,
    HostPublisher,
    LedgerRelease,
    ReleasePolicy,
    RunVerdict,
)

_log = structlog.get_logger(__name__)


def complete_frames(
    engine: Engine,
    reports: Sequence[CompletedFrame],
    *,
    policy: ReleasePolicy | None = None,
    ledger: LedgerRelease | None = None,
    changes: HostPublisher | None = None,
    counts: EventCounts | None = None,
    clock: Callable[[], float] = time.time,
) -> list[CompletionOutcome | DBAPIError]:
    """Apply reports that arrived together, in one transaction, and answer each in its place.

    A report whose rows the database refuses must not take the others with it: after such an error each is applied on
    its own, and only the culprit's place holds the error. An unreachable database is raised (DBAPIError): all
    reports are still to be done then.
    """
    policy = policy or ReleasePolicy()
    try:
        ended = end_runs(engine, reports, policy, clock=clock)
    except DBAPIError as error:
        if database_away(error):
            raise
        if len(reports) == 1:
            _log.error(
                "completion_refused",
                proc=reports[0].proc_id,
                frame=reports[0].frame_id,
                host=reports[0].host_name,
                error=str(error.orig).strip(),
            )
            return [error]
        answers: list[CompletionOutcome | DBAPIError] = []
        for report in reports:
            answers += complete_frames(
                engine, [report], policy=policy, ledger=ledger, changes=changes, counts=counts, clock=clock
            )
        return answers
    announce(ended, ledger, changes, counts)
    for report, outcome in zip(reports, ended.outcomes, strict=True):
        if counts is not None:
            counts.add(f"completion_{outcome.verdict.value}")
        _log_outcome(report, outcome)
    for job_id in ended.finished_jobs:
        _log.info("job_finished", job=job_id)
    return list(ended.outcomes)


def complete_frame(
    engine: Engine,
    report: CompletedFrame,
    *,
    policy: ReleasePolicy | None = None,
    ledger: LedgerRelease | None = None,
    changes: HostPublisher | None = None,
    clock: Callable[[], float] = time.time,
) -> CompletionOutcome:
    """Apply one report; raises DBAPIError when the database refused it or could not be reached."""
    (answer,) = complete_frames(engine, [report], policy=policy, ledger=ledger, changes=changes, clock=clock)
    if isinstance(answer, DBAPIError):
        raise answer
    return answer


def _log_outcome(report: CompletedFrame, outcome: CompletionOutcome) -> None:
    fields = {
        "proc": report.proc_id,
        "frame": report.frame_id,
        "name": report.name,
        "host": report.host_name,
        "exit_status": report.exit_status,
        "exit_signal": report.exit_signal,
    }
    if outcome.verdict in (RunVerdict.APPLIED, RunVerdict.ORPHAN_APPLIED):
        _log.debug("frame_completed", state=outcome.state, verdict=outcome.verdict.value, **fields)
    elif report.exit_status == 0 and outcome.verdict is not RunVerdict.STALE:
        _log.warning("successful_result_discarded", verdict=outcome.verdict.value, **fields)
    else:
        _log.info("completion_ignored", verdict=outcome.verdict.value, **fields)
