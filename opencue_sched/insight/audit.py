"""The audit: the design's invariants, checked against PostgreSQL and Redis as they are.

One function for the command line, the demo, the benchmarks and the tests. What state cannot show is not in it:
docs/architecture.md names the tests that show it.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from enum import StrEnum
from operator import attrgetter
from typing import cast

import redis
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import Amounts, ConsistencyCheck, check_consistency, drift
from opencue_sched.accounting.keys import EntryState, Record, unpack
from opencue_sched.accounting.ledger import Ledger, chunks
from opencue_sched.domain.farm import booked_cores
from opencue_sched.errors import InvalidInput, NotReady
from opencue_sched.settings import Settings
from opencue_sched.store.accounting import procs
from opencue_sched.store.insight import OFFENDERS_NAMED, RULES, judge

STAYS_WRONG_SECONDS = 2.0
LOOKS = 3
CHECK_DEADLINE_SECONDS = 5.0
KEYS_PER_ROUND_TRIP = 1000
LOST_AFTER_SECONDS = 60.0


class Severity(StrEnum):
    """How it is. FAIL must be put right; WARN is what somebody probably did not mean. UNDECIDED changed in every look:
    ask again."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"
    UNDECIDED = "undecided"


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing looked at, an invariant for an audit, with figures. ``remedy`` is empty when nothing is to be done.
    ``offenders`` are what is wrong or undecided."""

    level: Severity
    what: str
    text: str
    remedy: str = ""
    offenders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What an audit or the doctor found."""

    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether something must be put right."""
        return any(finding.level is Severity.FAIL for finding in self.findings)

    @property
    def undecided(self) -> bool:
        """Whether anything is: neither passed nor failed."""
        return any(finding.level is Severity.UNDECIDED for finding in self.findings)

    def lines(self) -> list[str]:
        """One line each, and one for each offender and for what to do."""
        levels = max(len(finding.level.value) for finding in self.findings)
        names = max(len(finding.what) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level.value:<{levels}}  {finding.what:<{names}}  {finding.text}")
            lines += [f"{'':<{levels + names + 4}}- {offender}" for offender in finding.offenders]
            lines += [f"{'':<{levels + names + 4}}-> {finding.remedy}"] if finding.remedy else []
        return lines

    def as_dict(self) -> dict[str, object]:
        return {
            "failed": self.failed,
            "undecided": self.undecided,
            "findings": [asdict(finding) for finding in self.findings],
        }


def run_audit(engine: Engine, client: redis.Redis, settings: Settings) -> Report:
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
    return Report(tuple(sorted(checks, key=attrgetter("what"))))


def _check(invariant: str, text: str, wrong: Sequence[str], undecided: Sequence[str] = ()) -> Finding:
    """Wrong is a failure whatever else is undecided; and what is undecided is never a pass."""
    level = Severity.FAIL if wrong else Severity.UNDECIDED if undecided else Severity.OK
    if undecided:
        text += f"; undecided: {len(undecided)} changed while looked at"
    named = (*wrong[:OFFENDERS_NAMED], *undecided[:OFFENDERS_NAMED])
    return Finding(level, invariant, text, offenders=named)


def _ready(ledger: Ledger) -> Finding:
    try:
        ledger.learn_epoch()
    except NotReady as error:
        return Finding(Severity.FAIL, "I8", f"the counters cannot be booked against: {error}")
    return Finding(Severity.OK, "I8", "the counters are filled and open")


# I1 and I4 of a farm at work: what only changed while it was looked at is told from what is wrong.
#
# Counters and ledger are compared by the consistency check of a recompute, which is exact under any load. PostgreSQL
# and Redis have no moment in common; so those ids that differ, and only those, are looked at again until they agree, or
# contradict each other as they did ``STAYS_WRONG_SECONDS`` ago.


def compare_counters(ledger: Ledger) -> Finding:
    """I1: every counter is the sum of its ledger entries. Wrong is what differs by the same amount in two checks,
    because another program's decrement may be on its way (release_feed cuebot-redis)."""
    text = "counters that are the sum of their ledger entries"
    try:
        check = _check_consistency(ledger)
        before = drift(check)
        if before:
            time.sleep(STAYS_WRONG_SECONDS)
            check = _check_consistency(ledger)
    except NotReady as error:
        return _check("I1", text, (), (str(error),))
    after = drift(check)
    wrong = [_contradiction(key, check.readings[key][1], off) for key, off in after.items() if before.get(key) == off]
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


_Sides = tuple[Record | None, Amounts | None]
"""What the ledger and PostgreSQL say of a proc, at two moments close to each other."""


def compare_procs(engine: Engine, ledger: Ledger, *, age_seconds: float) -> Finding:
    """I4: the ledger holds exactly the procs of managed shows, but for what is being booked this moment: a booking in
    flight may wait for its commit until it is ``age_seconds`` old."""
    records = {record.proc_id: record for record in ledger.records()}
    sides, contradictions = _look(engine, ledger, records, age_seconds)
    suspects = {proc_id: sides[proc_id] for proc_id in contradictions}
    wrong, undecided = _look_until_decided(engine, ledger, suspects, age_seconds)
    booked = sum(proc is None for proc_id, (_, proc) in sides.items() if proc_id not in contradictions)
    procs = sum(proc is not None for _, proc in sides.values())
    text = f"ledger and proc{'' if wrong else ' agree'}: {len(records)} entries, {procs} procs, {booked} being booked"
    return _check("I4", text, wrong, undecided)


def _look_until_decided(
    engine: Engine, ledger: Ledger, said: dict[str, _Sides], age: float
) -> tuple[list[str], list[str]]:
    """Look at these suspects again, LOOKS times at most, till each agrees or has contradicted itself unchanged.

    Returns what is wrong, and what never held still.
    """
    wrong: dict[str, str] = {}
    for _ in range(LOOKS):
        if not said:
            break
        time.sleep(STAYS_WRONG_SECONDS)
        sides, contradictions = _look(engine, ledger, _records(ledger, said), age, sorted(said))
        wrong |= {proc_id: text for proc_id, text in contradictions.items() if sides[proc_id] == said[proc_id]}
        said = {proc_id: sides[proc_id] for proc_id in contradictions.keys() - wrong.keys()}
    return [wrong[i] for i in sorted(wrong)], [f"proc {i} changed each time" for i in sorted(said)]


def _look(
    engine: Engine, ledger: Ledger, records: Mapping[str, Record], age: float, proc_ids: Sequence[str] | None = None
) -> tuple[dict[str, _Sides], dict[str, str]]:
    """Records read just now beside the procs, all or these, by their ids; and what contradicts."""
    with engine.connect() as connection:
        rows = procs(connection, proc_ids=proc_ids)
        held = {row.pk_proc: (booked_cores(row.centicores), row.gpus) for row in rows}
    booked_before = int(ledger.client.time()[0]) - age
    sides = {proc_id: (records.get(proc_id), held.get(proc_id)) for proc_id in records.keys() | held.keys()}
    found = {proc_id: _contradicting(proc_id, *said, booked_before) for proc_id, said in sides.items()}
    return sides, {proc_id: text for proc_id, text in found.items() if text}


def _contradicting(proc_id: str, record: Record | None, proc: Amounts | None, booked_before: float) -> str:
    """What is wrong about a proc; empty for one that is in both stores alike, or was booked just now."""
    if record is None:
        return f"proc {proc_id} is not in the ledger"
    if proc is None:
        young = record.state is EntryState.IN_FLIGHT and record.booked_at > booked_before
        return "" if young else f"ledger entry {proc_id} has no proc"
    try:
        held = record.booking.cores, record.booking.gpus
    except InvalidInput as error:
        return str(error)
    return "" if held == proc else f"proc {proc_id} holds {proc} cores and GPUs, its ledger entry {held}"


def _records(ledger: Ledger, proc_ids: Iterable[str]) -> dict[str, Record]:
    """Some entries of the ledger. As in Ledger.records, what cannot be read is no entry."""
    records = {}
    for part in chunks(sorted(proc_ids), KEYS_PER_ROUND_TRIP):
        texts = cast("list[str | None]", ledger.client.hmget(keys.LEDGER, list(part)))
        for proc_id, text in zip(part, texts, strict=True):
            with suppress(InvalidInput):
                records[proc_id] = unpack(proc_id, text or "")
    return records
