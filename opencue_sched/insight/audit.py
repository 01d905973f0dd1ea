"""The audit: the design's invariants, checked against PostgreSQL and Redis as they are.

One function for the command line, the demo, the benchmarks and the tests. What state cannot show is never called
"pass": it names the test that shows it.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import cast

import redis
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import Amounts, ConsistencyCheck, check_consistency, drift
from opencue_sched.accounting.entries import EntryState, Record, unpack
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.errors import InvalidInput, NotReady
from opencue_sched.settings import Settings
from opencue_sched.store import audit as store

# I1 and I4 of a farm at work: what only changed while it was looked at is told from what is wrong.
#
# Counters and ledger are compared by the consistency check of a recompute, which is exact under any load. PostgreSQL
# and Redis have no moment in common; so those ids that differ, and only those, are looked at again until they agree, or
# have contradicted each other unchanged for ``STAYS_WRONG_SECONDS``.

LOOK_AGAIN_SECONDS = 0.5
STAYS_WRONG_SECONDS = 2.0
LOOKS = 12
CHECK_DEADLINE_SECONDS = 5.0
KEYS_PER_ROUND_TRIP = 1000


@dataclass(frozen=True, slots=True)
class Compared:
    """``looked_at`` things were compared; ``wrong`` contradict each other, ``undecided`` never held still."""

    looked_at: int
    wrong: tuple[str, ...]
    undecided: tuple[str, ...] = ()


def compare_counters(ledger: Ledger) -> Compared:
    """I1: every counter is the sum of its ledger entries. Wrong is what differs by the same amount in two checks,
    because another program's decrement may be on its way (release_feed cuebot-redis)."""
    try:
        check = _check_consistency(ledger)
        before = drift(check)
        if before:
            time.sleep(LOOK_AGAIN_SECONDS)
            check = _check_consistency(ledger)
    except NotReady as error:
        return Compared(0, (), (str(error),))
    after = drift(check)
    wrong = {key for key, off in after.items() if before.get(key) == off}
    return Compared(
        len(check.readings),
        tuple(_contradiction(key, check.readings[key].counted, after[key]) for key in after if key in wrong),
        tuple(f"{key} differed by another amount each time" for key in sorted(before.keys() & after.keys() - wrong)),
    )


def _check_consistency(ledger: Ledger) -> ConsistencyCheck:
    """A complete check. Raises NotReady when other processes check the counters all the time."""
    deadline = time.monotonic() + CHECK_DEADLINE_SECONDS
    while not (check := check_consistency(ledger)).complete:
        if time.monotonic() >= deadline:
            raise NotReady("another process was checking the counters all the time")
        time.sleep(0.05)
    return check


def _contradiction(key: str, counted: Amounts, off: Amounts) -> str:
    """The counter and the sum of its entries: cores and GPUs, or the frames of a limit."""
    size = 1 if key.startswith(keys.LIMIT_PREFIX) else 2
    booked = counted[0] - off[0], counted[1] - off[1]
    return f"{key}: counter {counted[:size]}, ledger {booked[:size]}"


@dataclass(frozen=True, slots=True)
class ProcsCompared:
    """I4, with figures of the first look."""

    compared: Compared
    entries: int
    procs: int
    being_booked: int


@dataclass(frozen=True, slots=True)
class _Sides:
    """What both stores say of some procs, at two moments close to each other. ``now`` is Redis TIME, in seconds."""

    records: Mapping[str, Record]
    procs: Mapping[str, Amounts]
    now: int

    def contradiction(self, proc_id: str, age: float) -> str | None:
        """What is wrong about a proc. A booking in flight may wait for its commit until it is ``age`` seconds old."""
        record, proc = self.records.get(proc_id), self.procs.get(proc_id)
        if record is None:
            return None if proc is None else f"proc {proc_id} is not in the ledger"
        if proc is None:
            young = record.state is EntryState.IN_FLIGHT and self.now - record.booked_at < age
            return None if young else f"ledger entry {proc_id} has no proc"
        try:
            held = record.booking.cores, record.booking.gpus
        except InvalidInput as error:
            return str(error)
        return None if held == proc else f"proc {proc_id} holds {proc} cores and GPUs, its ledger entry {held}"

    def said(self, proc_id: str) -> object:
        return self.records.get(proc_id), self.procs.get(proc_id)


def compare_procs(engine: Engine, ledger: Ledger, *, age_seconds: float) -> ProcsCompared:
    """I4: the ledger holds exactly the procs of managed shows, but for what is being booked this moment."""
    records = {record.proc_id: record for record in ledger.records()}
    with engine.connect() as connection:
        first = _Sides(records, store.managed_procs(connection), _redis_seconds(ledger))
    suspects = {i for i in records.keys() | first.procs.keys() if first.contradiction(i, age_seconds)}
    compared = _look_until_decided(engine, ledger, first, suspects, age_seconds)
    in_flight = {i for i, record in records.items() if record.state is EntryState.IN_FLIGHT}
    looked_at = len(records.keys() | first.procs.keys())
    return ProcsCompared(
        Compared(looked_at, compared.wrong, compared.undecided),
        len(records),
        len(first.procs),
        len(in_flight - first.procs.keys() - set(suspects)),
    )


def _look_until_decided(engine: Engine, ledger: Ledger, first: _Sides, suspects: set[str], age: float) -> Compared:
    """Look at the suspects again, LOOKS times at most, till each agrees or has stayed wrong for long enough."""
    since = dict.fromkeys(suspects, time.monotonic())
    said = {proc_id: first.said(proc_id) for proc_id in suspects}
    wrong: dict[str, str] = {}
    for _ in range(LOOKS):
        if not since:
            break
        time.sleep(LOOK_AGAIN_SECONDS)
        sides = _look(engine, ledger, since.keys())
        for proc_id in tuple(since):
            contradiction = sides.contradiction(proc_id, age)
            if contradiction is None:
                del since[proc_id]
            elif sides.said(proc_id) != said[proc_id]:
                since[proc_id], said[proc_id] = time.monotonic(), sides.said(proc_id)
            elif time.monotonic() - since[proc_id] >= STAYS_WRONG_SECONDS:
                wrong[proc_id] = contradiction
                del since[proc_id]
    return Compared(
        len(suspects),
        tuple(wrong[proc_id] for proc_id in sorted(wrong)),
        tuple(f"proc {proc_id} changed each time" for proc_id in sorted(since)),
    )


def _look(engine: Engine, ledger: Ledger, proc_ids: Collection[str]) -> _Sides:
    """Both sides of some procs."""
    ids = sorted(proc_ids)
    records: dict[str, Record] = {}
    for start in range(0, len(ids), KEYS_PER_ROUND_TRIP):
        part = ids[start : start + KEYS_PER_ROUND_TRIP]
        texts = cast("list[str | None]", ledger.client.hmget(keys.LEDGER, part))
        for proc_id, text in zip(part, texts, strict=True):
            if text is not None and (record := _understood(proc_id, text)) is not None:
                records[proc_id] = record
    with engine.connect() as connection:
        return _Sides(records, store.managed_procs(connection, ids), _redis_seconds(ledger))


def _understood(proc_id: str, text: str) -> Record | None:
    """As Ledger.records: what is not understood is no entry (it was logged there)."""
    try:
        return unpack(proc_id, text)
    except InvalidInput:
        return None


def _redis_seconds(ledger: Ledger) -> int:
    return int(ledger.client.time()[0])


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
    "reports: tests/integration/farm/test_completion.py::test_a_duplicate_report_changes_nothing, "
    "tests/integration/farm/test_release_path.py::test_a_process_without_a_proc_is_dead_within_two_reports",
    "I9": "that dispatch stops and recovers with PostgreSQL: "
    "tests/chaos/test_stores.py::test_postgresql_restarts_and_the_fleet_goes_on",
    "I10": "that a paused ex-leader's writes are refused: "
    "tests/integration/coordination/test_leader.py::test_a_paused_ex_leader_fires_nothing, "
    "tests/chaos/test_coordination_leader.py::test_a_frozen_leader_fires_nothing_after_it_goes_on",
    "I11": "that no tick fires twice: "
    "tests/integration/coordination/test_leader.py::test_a_tick_fires_once_across_a_change_of_leader",
    "I12": "that malformed input harms nothing else: tests/integration/farm/test_service.py"
    "::test_a_bad_report_harms_no_other, tests/e2e/test_celery_commands.py::test_a_malformed_message_harms_nothing",
}
"""What state cannot show, and the tests that show it."""


def run_audit(engine: Engine, client: redis.Redis, settings: Settings) -> AuditReport:
    """Check everything, of a farm at rest or at work.

    Each check of PostgreSQL alone is one statement, and so of one moment. Nothing is written, but that the scripts log
    their changes while counters and ledger are compared (``acct:audit``).
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


def _found(invariant: str, text: str, finding: store.Contradictions) -> Check:
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
