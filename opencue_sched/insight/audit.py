"""The audit: the design's invariants, checked against PostgreSQL and Redis as they are.

One function for the command line, the demo, the benchmarks and the tests. What state cannot show is never called
"pass": it names the test that shows it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import cast

import redis
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import Amounts, ConsistencyCheck, check_consistency, drift
from opencue_sched.accounting.keys import EntryState, Record, unpack
from opencue_sched.accounting.ledger import Ledger, chunks
from opencue_sched.errors import InvalidInput, NotReady
from opencue_sched.settings import Settings
from opencue_sched.store.insight import OFFENDERS_NAMED, RULES, judge, managed_procs

LOOK_AGAIN_SECONDS = 0.5
STAYS_WRONG_SECONDS = 2.0
LOOKS = 12
CHECK_DEADLINE_SECONDS = 5.0
KEYS_PER_ROUND_TRIP = 1000
LOST_AFTER_SECONDS = 60.0


class Outcome(StrEnum):
    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
    UNDECIDED = "undecided"
    NOT_SHOWN = "not shown by state"


@dataclass(frozen=True, slots=True)
class Check:
    """One invariant: what was looked at, with figures, the offenders if there are any, and the tests that show what
    state does not."""

    invariant: str
    outcome: Outcome
    text: str
    offenders: tuple[str, ...] = ()
    tests: tuple[str, ...] = ()


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
        """One line per invariant, and one per named offender; the tests are for scripts."""
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
    "I3": (
        "that a recompute completes under any load",
        "tests/integration/accounting/test_interleavings.py"
        "::test_a_recompute_completes_while_something_moves_in_every_window",
    ),
    "I5": (
        "that only the owning proc's completion counts, and a process without a proc is killed within two host reports",
        "tests/integration/farm/test_completion.py::test_a_duplicate_report_changes_nothing",
        "tests/integration/farm/test_release_path.py::test_a_process_without_a_proc_is_dead_within_two_reports",
    ),
    "I9": (
        "that dispatch stops and recovers with PostgreSQL",
        "tests/chaos/test_stores.py::test_postgresql_restarts_and_the_fleet_goes_on",
    ),
    "I10": (
        "that a paused ex-leader's writes are refused",
        "tests/integration/coordination/test_leader.py::test_a_paused_ex_leader_fires_nothing",
        "tests/chaos/test_coordination_leader.py::test_a_frozen_leader_fires_nothing_after_it_goes_on",
    ),
    "I11": (
        "that no tick fires twice",
        "tests/integration/coordination/test_leader.py::test_a_tick_fires_once_across_a_change_of_leader",
    ),
    "I12": (
        "that malformed input harms nothing else",
        "tests/integration/farm/test_service.py::test_a_bad_report_harms_no_other",
        "tests/e2e/test_celery_commands.py::test_a_malformed_message_harms_nothing",
    ),
}
"""What state cannot show, and the tests that show it."""


def run_audit(engine: Engine, client: redis.Redis, settings: Settings) -> AuditReport:
    """Check everything, of a farm at rest or at work.

    Each check of PostgreSQL alone is one statement, and so of one moment. Nothing is written, but that the scripts log
    their changes while counters and ledger are compared (``acct:audit``).
    """
    ledger = Ledger(client, owner="audit")
    checks = [compare_counters(ledger), compare_procs(engine, ledger, age_seconds=settings.accounting.in_flight_age)]
    with engine.connect() as connection:
        for invariant, (text, _) in RULES.items():
            found = judge(connection, invariant, grace_seconds=LOST_AFTER_SECONDS)
            text = f"{text}: {found.looked_at - found.wrong} of {found.looked_at}"
            checks.append(_check(invariant, text, found.named or ()))
    checks.append(_ready(ledger))
    checks += [Check(name, Outcome.NOT_SHOWN, text, tests=tuple(shown)) for name, (text, *shown) in _BY_TEST.items()]
    return AuditReport(tuple(sorted(checks, key=lambda check: (int(check.invariant[1:].rstrip("b")), check.invariant))))


def _check(invariant: str, text: str, wrong: Sequence[str], undecided: Sequence[str] = ()) -> Check:
    """Wrong is a failure whatever else is undecided; and what is undecided is never a pass."""
    outcome = Outcome.FAIL if wrong else Outcome.UNDECIDED if undecided else Outcome.PASS
    if undecided:
        text += f"; undecided: {len(undecided)} changed while looked at"
    return Check(invariant, outcome, text, (*wrong[:OFFENDERS_NAMED], *undecided[:OFFENDERS_NAMED]))


def _ready(ledger: Ledger) -> Check:
    try:
        ledger.learn_epoch()
    except NotReady as error:
        return Check("I8", Outcome.FAIL, f"the counters cannot be booked against: {error}")
    shown = "tests/chaos/test_stores.py::test_an_emptied_redis_stops_booking_and_is_filled_again_by_one_process"
    return Check("I8", Outcome.PASS, "the counters are filled and open", tests=(shown,))


# I1 and I4 of a farm at work: what only changed while it was looked at is told from what is wrong.
#
# Counters and ledger are compared by the consistency check of a recompute, which is exact under any load. PostgreSQL
# and Redis have no moment in common; so those ids that differ, and only those, are looked at again until they agree, or
# have contradicted each other unchanged for ``STAYS_WRONG_SECONDS``.


def compare_counters(ledger: Ledger) -> Check:
    """I1: every counter is the sum of its ledger entries. Wrong is what differs by the same amount in two checks,
    because another program's decrement may be on its way (release_feed cuebot-redis)."""
    text = "counters that are the sum of their ledger entries"
    try:
        check = _check_consistency(ledger)
        before = drift(check)
        if before:
            time.sleep(LOOK_AGAIN_SECONDS)
            check = _check_consistency(ledger)
    except NotReady as error:
        return _check("I1", text, (), (str(error),))
    after = drift(check)
    wrong = [
        _contradiction(key, check.readings[key].counted, off) for key, off in after.items() if before.get(key) == off
    ]
    moving = sorted(key for key, off in after.items() if before.get(key) not in (None, off))
    text += f": {len(check.readings) - len(wrong)} of {len(check.readings)}"
    return _check("I1", text, wrong, [f"{key} differed by another amount each time" for key in moving])


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
class _Sides:
    """What both stores say of some procs, at two moments close to each other. ``now`` is Redis TIME, in seconds."""

    records: Mapping[str, Record]
    procs: Mapping[str, Amounts]
    now: int

    def contradiction(self, proc_id: str, age: float) -> str | None:
        """What is wrong about a proc. A booking in flight may wait for its commit until it is ``age`` seconds old."""
        record, proc = self.said(proc_id)
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

    def said(self, proc_id: str) -> tuple[Record | None, Amounts | None]:
        return self.records.get(proc_id), self.procs.get(proc_id)


def compare_procs(engine: Engine, ledger: Ledger, *, age_seconds: float) -> Check:
    """I4: the ledger holds exactly the procs of managed shows, but for what is being booked this moment."""
    first = _look(engine, ledger, {record.proc_id: record for record in ledger.records()})
    suspects = {i for i in first.records.keys() | first.procs.keys() if first.contradiction(i, age_seconds)}
    wrong, undecided = _look_until_decided(engine, ledger, {i: first.said(i) for i in suspects}, age_seconds)
    in_flight = {i for i, record in first.records.items() if record.state is EntryState.IN_FLIGHT}
    booked = len(in_flight - first.procs.keys() - suspects)
    agree = "" if wrong else " agree"
    text = f"ledger and proc{agree}: {len(first.records)} entries, {len(first.procs)} procs, {booked} being booked"
    return _check("I4", text, wrong, undecided)


def _look_until_decided(
    engine: Engine, ledger: Ledger, said: dict[str, tuple[Record | None, Amounts | None]], age: float
) -> tuple[list[str], list[str]]:
    """Look at these suspects again, LOOKS times at most, till each agrees or has stayed wrong for long enough.

    Returns what is wrong, and what never held still.
    """
    since = dict.fromkeys(said, time.monotonic())
    wrong: dict[str, str] = {}
    for _ in range(LOOKS):
        if not since:
            break
        time.sleep(LOOK_AGAIN_SECONDS)
        sides = _look(engine, ledger, _records(ledger, since), since)
        for proc_id in tuple(since):
            contradiction = sides.contradiction(proc_id, age)
            if contradiction is None:
                del since[proc_id]
            elif sides.said(proc_id) != said[proc_id]:
                since[proc_id], said[proc_id] = time.monotonic(), sides.said(proc_id)
            elif time.monotonic() - since[proc_id] >= STAYS_WRONG_SECONDS:
                wrong[proc_id] = contradiction
                del since[proc_id]
    return [wrong[i] for i in sorted(wrong)], [f"proc {i} changed each time" for i in sorted(since)]


def _look(
    engine: Engine, ledger: Ledger, records: Mapping[str, Record], proc_ids: Iterable[str] | None = None
) -> _Sides:
    """Records read just now, beside the procs: all, or these."""
    with engine.connect() as connection:
        procs = managed_procs(connection, None if proc_ids is None else sorted(proc_ids))
    return _Sides(records, procs, int(ledger.client.time()[0]))


def _records(ledger: Ledger, proc_ids: Iterable[str]) -> dict[str, Record]:
    """Some entries of the ledger. As in Ledger.records, what cannot be read is no entry."""
    records = {}
    for part in chunks(sorted(proc_ids), KEYS_PER_ROUND_TRIP):
        texts = cast("list[str | None]", ledger.client.hmget(keys.LEDGER, list(part)))
        for proc_id, text in zip(part, texts, strict=True):
            try:
                if text is not None:
                    records[proc_id] = unpack(proc_id, text)
            except InvalidInput:
                continue
    return records
