"""The audit: the design's invariants, checked against PostgreSQL and Redis as they are.

One function for the command line, the demo, the benchmarks and the tests. What state cannot show is never called
"pass": it names the test that shows it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from enum import StrEnum

import redis
from sqlalchemy import Engine

from opencue_sched.accounting import keys
from opencue_sched.accounting.entries import EntryState, Record
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.domain.errors import NotReady
from opencue_sched.settings import Settings
from opencue_sched.store import audit as store

LOST_AFTER_SECONDS = 60.0
KEYS_PER_ROUND_TRIP = 1000


class Outcome(StrEnum):
    PASS = "pass"  # noqa: S105 - not a password
    FAIL = "fail"
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

    def lines(self) -> list[str]:
        """One line per invariant, and one per named offender."""
        out = []
        for check in self.checks:
            out.append(f"{check.invariant:<4} {check.outcome.value:<18} {check.text}")
            out += [f"       - {offender}" for offender in check.offenders]
        return out

    def as_dict(self) -> dict[str, object]:
        return {"failed": self.failed, "checks": [asdict(check) for check in self.checks]}


_BY_TEST = {
    "I3": "that a recompute completes under any load: tests/integration/accounting/test_recompute.py",
    "I5": "that only the owning proc's completion counts, and a process without a proc is killed within two host "
    "reports: tests/integration/release",
    "I9": "that dispatch stops and recovers with PostgreSQL: tests/chaos",
    "I10": "that a paused ex-leader's writes are refused: tests/integration/coordination/test_leader.py",
    "I11": "that no tick fires twice: tests/integration/coordination/test_leader.py",
    "I12": "that malformed input harms nothing else: tests/integration",
}


def run_audit(engine: Engine, client: redis.Redis, settings: Settings) -> AuditReport:
    """Check everything once. Reads only; a farm at work may show a booking that is just being made as I4 in flight."""
    ledger = Ledger(client, owner="audit")
    records = list(ledger.records())
    with engine.connect() as connection:
        procs = store.managed_procs(connection)
        checks = [
            _counters(client, records),
            _found("I2", "vertices with procs within their caps (lowered ones show too)", store.over_cap(connection)),
            _ledger_is_proc(records, procs, settings, int(client.time()[0])),
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


def _counters(client: redis.Redis, records: list[Record]) -> Check:
    """I1: every counter is the sum of its ledger entries."""
    cores: Counter[str] = Counter()
    gpus: Counter[str] = Counter()
    frames: Counter[str] = Counter()
    for record in records:
        for key in keys.counted(record.booking.vertices):
            cores[key] += record.booking.cores
            gpus[key] += record.booking.gpus
            frames[key] += 1
    found = [str(key) for kind in keys.VertexKind for key in client.scan_iter(match=keys.pattern(kind), count=1000)]
    wrong = []
    for key, have in _read_counters(client, list(dict.fromkeys((*found, *cores)))).items():
        ref = keys.parse(key)
        limit = ref is not None and ref.kind is keys.VertexKind.LIMIT
        want = (frames[key],) if limit else (cores[key], gpus[key])
        if have != want:
            wrong.append(f"{key}: counter {have}, ledger {want}")
    looked_at = len(set(found) | set(cores))
    return Check(
        "I1",
        Outcome.FAIL if wrong else Outcome.PASS,
        f"counters that are the sum of their ledger entries: {looked_at - len(wrong)} of {looked_at} "
        f"({len(records)} entries)",
        tuple(wrong[: store.OFFENDERS_NAMED]),
    )


def _read_counters(client: redis.Redis, vertices: list[str]) -> dict[str, tuple[int, ...]]:
    """Cores and GPUs of each vertex, or the running frames of a limit; zeros for a counter that is not there."""
    counters: dict[str, tuple[int, ...]] = {}
    for start in range(0, len(vertices), KEYS_PER_ROUND_TRIP):
        part = vertices[start : start + KEYS_PER_ROUND_TRIP]
        with client.pipeline(transaction=False) as pipe:
            for key in part:
                limit = key.startswith(keys.limit(""))
                pipe.hmget(key, ["int_running"] if limit else ["int_cores", "int_gpus"])
            for key, values in zip(part, pipe.execute(), strict=True):
                counters[key] = tuple(int(value or 0) for value in values)
    return counters


def _ledger_is_proc(records: list[Record], procs: dict[str, tuple[int, int]], settings: Settings, now: int) -> Check:
    """I4: the ledger holds exactly the procs of managed shows; what is being booked this moment is counted apart."""
    young = {
        r.booking.proc_id
        for r in records
        if r.state is EntryState.IN_FLIGHT and now - r.booked_at < settings.accounting.in_flight_age
    }
    held = {r.booking.proc_id: (r.booking.cores, r.booking.gpus) for r in records}
    wrong = [f"ledger entry {proc_id} has no proc" for proc_id in held.keys() - procs.keys() - young]
    wrong += [f"proc {proc_id} is not in the ledger" for proc_id in procs.keys() - held.keys()]
    wrong += [
        f"proc {proc_id} holds {procs[proc_id]} cores and GPUs, its ledger entry {held[proc_id]}"
        for proc_id in held.keys() & procs.keys()
        if held[proc_id] != procs[proc_id]
    ]
    return Check(
        "I4",
        Outcome.FAIL if wrong else Outcome.PASS,
        f"ledger and proc agree: {len(held)} entries, {len(procs)} procs, {len(young - procs.keys())} being booked",
        tuple(wrong[: store.OFFENDERS_NAMED]),
    )


def _ready(ledger: Ledger) -> Check:
    check: Callable[[], object] = ledger.learn_epoch
    try:
        check()
    except NotReady as error:
        return Check("I8", Outcome.FAIL, f"the counters cannot be booked against: {error}")
    return Check("I8", Outcome.PASS, "the counters are filled and open; recovery after a loss: tests/chaos")
