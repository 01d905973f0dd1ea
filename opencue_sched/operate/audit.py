"""The audit: the design's invariants, checked against PostgreSQL and Redis as they are.

One function for the command line, the demo, the benchmarks and the tests. What state cannot show is never called
"pass": it names the test that shows it.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum

import redis
from sqlalchemy import Engine

from opencue_sched.accounting.ledger import Ledger
from opencue_sched.domain.errors import NotReady
from opencue_sched.operate.audit_ledger import Compared, compare_counters, compare_procs
from opencue_sched.settings import Settings
from opencue_sched.store import audit as store

LOST_AFTER_SECONDS = 60.0


class Outcome(StrEnum):
    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    UNDECIDED = "undecided"
    NOT_SHOWN = "not shown by state"


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant: what was looked at, with figures, and the offenders if there are any."""

    invariant: str
    outcome: Outcome
    text: str
    offenders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class AuditReport:
    checks: tuple[Check, ...]

    @property
    def failed(self) -> bool:
        return any(check.outcome is Outcome.FAIL for check in self.checks)

    @property
    def undecided(self) -> bool:
        """Something changed in every look. Neither passed nor failed: ask again."""
        return any(check.outcome is Outcome.UNDECIDED for check in self.checks)

    def lines(self) -> list[str]:
        """One line per invariant, and one per named offender."""
        out = []
        for check in self.checks:
            out.append(f"{check.invariant:<4} {check.outcome.value:<18} {check.text}")
            out += [f"       - {offender}" for offender in check.offenders]
        return out

    def as_dict(self) -> dict[str, object]:
        return {
            "failed": self.failed,
            "undecided": self.undecided,
            "checks": [asdict(check) for check in self.checks],
        }


_BY_TEST = {
    "I3": "that a recompute completes under any load: tests/integration/accounting/test_interleavings.py"
    "::test_a_recompute_completes_while_something_moves_in_every_window",
    "I5": "that only the owning proc's completion counts, and a process without a proc is killed within two host "
    "reports: tests/integration/release/test_completion.py::test_a_duplicate_report_changes_nothing, "
    "tests/integration/release/test_way_back.py::test_a_process_without_a_proc_is_dead_within_two_reports",
    "I9": "that dispatch stops and recovers with PostgreSQL: "
    "tests/chaos/test_stores.py::test_postgresql_restarts_and_the_fleet_goes_on",
    "I10": "that a paused ex-leader's writes are refused: "
    "tests/integration/coordination/test_leader.py::test_a_paused_ex_leader_fires_nothing, "
    "tests/chaos/test_coordination_leader.py::test_a_frozen_leader_fires_nothing_after_it_goes_on",
    "I11": "that no tick fires twice: "
    "tests/integration/coordination/test_leader.py::test_a_tick_fires_once_across_a_change_of_leader",
    "I12": "that malformed input harms nothing else: tests/integration/release/test_service.py"
    "::test_a_bad_report_harms_no_other, tests/e2e/test_celery_commands.py::test_a_malformed_message_harms_nothing",
}
"""What state cannot show, and the tests that show it."""


def run_audit(engine: Engine, client: redis.Redis, settings: Settings) -> AuditReport:
    """Check everything, of a farm at rest or at work.

    Each check of PostgreSQL alone is one statement, and so of one moment. How counters, ledger and procs are compared
    while they change is told in audit_ledger; a farm at work makes the scripts log their changes for that moment
    (``acct:audit``), and nothing else is written.
    """
    ledger = Ledger(client, owner="audit")
    checks = [_counters(ledger), _ledger_is_proc(engine, ledger, settings)]
    with engine.connect() as connection:
        checks += [
            _found("I2", "vertices with procs within their caps (lowered ones show too)", store.over_cap(connection)),
            _found(
                "I6",
                "RUNNING frames and procs belong together",
                store.lost_frames(connection, grace_seconds=LOST_AFTER_SECONDS),
            ),
            _found("I6b", "layers whose counters are what their frames say", store.wrong_counts(connection)),
            _found("I7", "hosts whose idle is total less procs, none negative", store.wrong_idle(connection)),
        ]
    checks.append(_ready(ledger))
    checks += [Check(name, Outcome.NOT_SHOWN, text) for name, text in _BY_TEST.items()]
    return AuditReport(tuple(sorted(checks, key=lambda check: (int(check.invariant[1:].rstrip("b")), check.invariant))))


def _found(invariant: str, text: str, finding: store.Finding) -> Check:
    outcome = Outcome.FAIL if finding.wrong else Outcome.PASS
    return Check(
        invariant, outcome, f"{text}: {finding.looked_at - finding.wrong} of {finding.looked_at}", finding.named
    )


def _compared(invariant: str, text: str, compared: Compared) -> Check:
    """Wrong is a failure whatever else is undecided; and what is undecided is never a pass."""
    outcome = Outcome.FAIL if compared.wrong else Outcome.UNDECIDED if compared.undecided else Outcome.PASS
    if compared.undecided:
        text += f"; undecided: {len(compared.undecided)} changed while looked at"
    named = compared.wrong[: store.OFFENDERS_NAMED] + compared.undecided[: store.OFFENDERS_NAMED]
    return Check(invariant, outcome, text, named)


def _counters(ledger: Ledger) -> Check:
    """I1: every counter is the sum of its ledger entries."""
    found = compare_counters(ledger)
    good = found.looked_at - len(found.wrong)
    text = f"counters that are the sum of their ledger entries: {good} of {found.looked_at}"
    return _compared("I1", text, found)


def _ledger_is_proc(engine: Engine, ledger: Ledger, settings: Settings) -> Check:
    """I4: the ledger holds exactly the procs of managed shows; what is being booked this moment is counted apart."""
    found = compare_procs(engine, ledger, age_seconds=settings.accounting.in_flight_age)
    agree = "" if found.compared.wrong else " agree"
    text = f"ledger and proc{agree}: {found.entries} entries, {found.procs} procs, {found.being_booked} being booked"
    return _compared("I4", text, found.compared)


def _ready(ledger: Ledger) -> Check:
    try:
        ledger.learn_epoch()
    except NotReady as error:
        return Check("I8", Outcome.FAIL, f"the counters cannot be booked against: {error}")
    shown = "tests/chaos/test_stores.py::test_an_emptied_redis_stops_booking_and_is_filled_again_by_one_process"
    return Check("I8", Outcome.PASS, f"the counters are filled and open; recovery after a loss: {shown}")
