"""The audit: the invariants of domain/invariants.py, checked against PostgreSQL and Redis as they are.

One function for the command line, the demo, the benchmarks and the tests. What state cannot show is not in it:
docs/architecture.md names the tests that show it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TypeVar

import redis
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import Amounts, ConsistencyCheck, check_consistency, drift
from opencue_sched.accounting.damage import find_damage
from opencue_sched.accounting.keys import EntryState, Record, unpack_entry
from opencue_sched.accounting.ledger import Ledger, answering
from opencue_sched.domain.invariants import Invariant
from opencue_sched.domain.units import booked_cores
from opencue_sched.errors import InvalidInput, NotReady
from opencue_sched.settings import Settings
from opencue_sched.store.accounting import procs
from opencue_sched.store.audit import OFFENDERS_NAMED, RULES, judge

STAYS_WRONG_SECONDS = 2.0
"""Time between the two looks at a contradiction: one that changes meanwhile is of work under way."""
CHECK_DEADLINE_SECONDS = 5.0
"""How long a check of the counters waits for those of other processes."""
LOST_AFTER_SECONDS = 60.0
"""How long a frame may be RUNNING without a proc, or a proc be without its frame, before that is wrong."""

T = TypeVar("T")
U = TypeVar("U")


class Severity(StrEnum):
    """How bad a finding is. FAIL must be put right; WARN is what was probably not meant."""

    OK = "ok"
    WARN = "warn"
    FAIL = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """What an audit or the doctor found about one invariant or topic, with figures."""

    level: Severity
    what: str
    """The name of an invariant for an audit; a topic such as "counters" for the doctor."""
    text: str
    remedy: str = ""
    """What to do, or empty when nothing is to be done."""
    offenders: tuple[str, ...] = ()
    """The rows, keys or hosts that are wrong, each with words."""


@dataclass(frozen=True, slots=True)
class Report:
    """What an audit or the doctor found."""

    findings: tuple[Finding, ...]

    @property
    def failed(self) -> bool:
        """Whether something must be put right."""
        return any(finding.level is Severity.FAIL for finding in self.findings)

    def lines(self) -> list[str]:
        """A line for each finding, and one for each of its offenders and for its remedy."""
        levels = max(len(finding.level.value) for finding in self.findings)
        names = max(len(finding.what) for finding in self.findings)
        lines = []
        for finding in self.findings:
            lines.append(f"{finding.level.value:<{levels}}  {finding.what:<{names}}  {finding.text}")
            lines += [f"{'':<{levels + names + 4}}- {offender}" for offender in finding.offenders]
            lines += [f"{'':<{levels + names + 4}}-> {finding.remedy}"] if finding.remedy else []
        return lines

    def as_dict(self) -> dict[str, object]:
        """The report as a JSON document."""
        return {"failed": self.failed, "findings": [asdict(finding) for finding in self.findings]}


def run_audit(engine: Engine, client: redis.Redis, settings: Settings) -> Report:
    """Check everything, of a farm at rest or at work.

    Each check of PostgreSQL alone is one statement, and so of one moment. Nothing is written, but that the scripts log
    their changes while counters and ledger are compared (``acct:audit``).
    """
    ledger = Ledger(client, owner="audit")
    accounting = settings.accounting
    counted_after = accounting.recompute_interval_seconds + LOST_AFTER_SECONDS
    ready = check_ready(ledger)
    checks = [ready]
    if ready.level is Severity.OK:
        age = accounting.in_flight_age
        checks.append(compare_counters(ledger))
        checks.append(compare_procs(engine, ledger, age_seconds=age, local_seconds=counted_after))
    else:
        text = f"not looked at: {ready.text}"
        checks += [
            Finding(Severity.WARN, what, text, "run it again")
            for what in (Invariant.COUNTERS_MATCH_LEDGER, Invariant.LEDGER_MATCHES_PROCS)
        ]
    with engine.connect() as connection:
        for invariant in RULES:
            found = judge(connection, invariant, grace_seconds=LOST_AFTER_SECONDS)
            checks.append(_check(invariant, f"{found.looked_at - found.wrong} of {found.looked_at}", found.named or ()))
    in_order = list(Invariant)
    return Report(tuple(sorted(checks, key=lambda check: in_order.index(Invariant(check.what)))))


def _check(invariant: Invariant, figures: str, wrong: Sequence[str]) -> Finding:
    """The finding on an invariant: it fails if anything is ``wrong``."""
    level = Severity.FAIL if wrong else Severity.OK
    return Finding(level, invariant, f"{invariant.sentence}: {figures}", offenders=tuple(wrong[:OFFENDERS_NAMED]))


def check_ready(ledger: Ledger) -> Finding:
    """Whether the counters are open, and none of the keys that they are counted by is damaged. Closes no store."""
    try:
        ledger.learn_epoch()
        with answering():
            damage = find_damage(ledger.client)
        damage = damage or ledger.seq_behind(ledger.records())
    except NotReady as error:
        text = f"the counters cannot be booked against: {error}"
        remedy = "a worker fills them by itself; `opencue-sched fleet` shows whether one runs"
        return Finding(Severity.FAIL, Invariant.COUNTERS_OPEN, text, remedy)
    if damage:
        text = f"the counters are damaged: {damage}"
        remedy = "find out what writes to acct:*; a worker fills them anew by itself"
        return Finding(Severity.FAIL, Invariant.COUNTERS_OPEN, text, remedy)
    return Finding(Severity.OK, Invariant.COUNTERS_OPEN, "the counters are filled and open")


# Counters, ledger and procs of a farm at work: what only changed while it was looked at is told from what is wrong.
#
# Counters and ledger are compared by the consistency check of a recompute, which is exact under any load. PostgreSQL
# and Redis have no moment in common, and the decrement of another program may be on its way to a counter (release_feed
# cuebot-redis). So what contradicts is looked at twice: wrong is what contradicts as it did STAYS_WRONG_SECONDS before.


def _twice(look: Callable[[], tuple[T, dict[str, U]]]) -> tuple[T, dict[str, U]]:
    """What the last look saw, and what contradicted in the same way in both. One look is enough where nothing does."""
    seen, before = look()
    if not before:
        return seen, before
    time.sleep(STAYS_WRONG_SECONDS)
    seen, after = look()
    return seen, {key: contradiction for key, contradiction in after.items() if before.get(key) == contradiction}


def compare_counters(ledger: Ledger, *, found_before: Mapping[str, Amounts] | None = None) -> Finding:
    """Whether every counter is the sum of its ledger entries.

    ``found_before``: the counters, by key, that count as wrong if they are off by as much as this says; None: every
    counter that is off counts.
    """

    def look() -> tuple[ConsistencyCheck, dict[str, Amounts]]:
        check = _check_consistency(ledger)
        return check, drift(check)

    try:
        check, wrong = _twice(look)
        machines = check.wrong_machines if found_before is None else []
        if found_before is not None:
            wrong = {key: off for key, off in wrong.items() if found_before.get(key) == off}
    except NotReady as error:
        invariant = Invariant.COUNTERS_MATCH_LEDGER
        return Finding(Severity.WARN, invariant, f"{invariant.sentence}: not looked at, {error}", "run it again")
    offenders = [_contradiction(key, check.readings[key][1], off) for key, off in wrong.items()]
    offenders += [f"{key}: the machines of its limit do not say whether frames are counted there" for key in machines]
    figures = f"{len(check.readings) - len(wrong)} of {len(check.readings)}"
    return _check(Invariant.COUNTERS_MATCH_LEDGER, figures, offenders)


def _check_consistency(ledger: Ledger) -> ConsistencyCheck:
    """A complete check. Raises NotReady when other processes check the counters all the time."""
    deadline = time.monotonic() + CHECK_DEADLINE_SECONDS
    while not (check := check_consistency(ledger)).complete:
        if time.monotonic() >= deadline:
            raise NotReady("another process was checking the counters all the time")
        time.sleep(0.05)
    return check


def _contradiction(key: str, counted: Amounts, off: Amounts) -> str:
    """The words for a counter that is not the sum of its entries: cores and GPUs, or the frames of a limit."""
    size = 1 if key.startswith(keys.LIMIT_PREFIX) else 2
    booked = counted[0] - off[0], counted[1] - off[1]
    return f"{key}: counter {counted[:size]}, ledger {booked[:size]}"


Contradictions = Mapping[str, tuple[str, Record | None]]
"""What is wrong about procs, by id: in words, and the ledger's record of the proc if there is one."""


def compare_procs(
    engine: Engine,
    ledger: Ledger,
    *,
    age_seconds: float,
    local_seconds: float = 0.0,
    select: Callable[[Contradictions], Collection[str]] | None = None,
) -> Finding:
    """Whether the ledger holds exactly the procs of managed shows, but for what is being booked this moment.

    A booking in flight may wait for its commit until it is ``age_seconds`` old. A local proc, which a Cuebot books
    without a word, may wait for a recompute to count it until it is ``local_seconds`` old.

    ``select`` returns the ids of the contradictions that count; None: all count.
    """

    def look() -> tuple[tuple[Mapping[str, Record], Mapping[str, Amounts], int], dict[str, tuple[str, Record | None]]]:
        records = {record.proc_id: record for record in ledger.records()}
        with engine.connect() as connection:
            rows = list(procs(connection))
        young = {row.pk_proc for row in rows if row.local_seconds is not None and row.local_seconds < local_seconds}
        uncounted = young - records.keys()
        held = {row.pk_proc: (booked_cores(row.centicores), row.gpus) for row in rows if row.pk_proc not in uncounted}
        booked_before = int(ledger.client.time()[0]) - age_seconds
        found = {}
        for proc_id in records.keys() | held.keys():
            record = records.get(proc_id)
            if told := _contradicting(proc_id, record, held.get(proc_id), booked_before):
                found[proc_id] = told, record
        return (records, held, len(uncounted)), found

    (records, held, uncounted), wrong = _twice(look)
    if select is not None:
        wrong = {proc_id: wrong[proc_id] for proc_id in select(wrong)} if wrong else {}
    booked = len(records.keys() - held.keys() - wrong.keys())
    figures = (
        f"{len(records)} entries, {len(held)} procs, {booked} being booked"
        f"{f', {uncounted} local not counted yet' if uncounted else ''}"
    )
    return _check(Invariant.LEDGER_MATCHES_PROCS, figures, [wrong[proc_id][0] for proc_id in sorted(wrong)])


def _contradicting(proc_id: str, record: Record | None, proc: Amounts | None, booked_before: float) -> str:
    """What is wrong about a proc; empty for one that is in both stores alike, or was booked just now."""
    if record is None:
        return f"proc {proc_id} is not in the ledger"
    if proc is None:
        young = record.state is EntryState.IN_FLIGHT and record.booked_at > booked_before
        return "" if young else f"ledger entry {proc_id} has no proc"
    try:
        booked = unpack_entry(proc_id, record.entry)
    except InvalidInput as error:
        return str(error)
    held = booked.cores, booked.gpus
    return "" if held == proc else f"proc {proc_id} holds {proc} cores and GPUs, its ledger entry {held}"
