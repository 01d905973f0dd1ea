"""After any sequence of operations counters are the sum of their entries, and no booking passed a cap."""

from __future__ import annotations

from dataclasses import replace

import redis
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from opencue_sched.accounting import keys
from opencue_sched.accounting.consistency import ConsistencyCheck, check_consistency, drift
from opencue_sched.accounting.keys import Booking, EntryState
from opencue_sched.accounting.ledger import Change
from opencue_sched.domain.caps import Vertices
from tests.kit.counters import Store
from tests.kit.examples import examples
from tests.kit.forced import force

IDS = [f"p{i}" for i in range(6)]
CAPS = {
    keys.subscription("s", "a0"): {"size": 9, "burst": 9},
    keys.subscription("s", "a1"): {"size": 0, "burst": 0},
    keys.folder("f0"): {"int_max_cores": 8, "int_max_gpus": -1},
    keys.folder("f1"): {"int_max_cores": -1, "int_max_gpus": 2},
    keys.job("j0"): {"int_max_cores": 5, "int_max_gpus": 3},
    keys.job("j1"): {"int_max_cores": 0.5, "int_max_gpus": 0},
    keys.limit("n0"): {"int_max_value": 2, "int_foreign": 0},
    keys.limit("n1"): {"int_max_value": 3, "int_foreign": 2},
}

vertices = st.builds(
    Vertices,
    show_id=st.just("s"),
    alloc_id=st.sampled_from(["a0", "a0", "a0", "a1", ""]),
    folder_id=st.sampled_from(["f0", "f1"]),
    job_id=st.sampled_from(["j0", "j0", "j0", "j1", ""]),
    layer_id=st.sampled_from(["l0", "l1", ""]),
    dept_id=st.sampled_from(["d0", ""]),
    limit_ids=st.sampled_from([(), (), ("n0",), ("n0", "n1")]),
)
bookings = st.builds(
    Booking,
    proc_id=st.sampled_from(IDS),
    vertices=vertices,
    cores=st.integers(1, 4),
    gpus=st.sampled_from([0, 0, 1, 2]),
)
operations = st.one_of(
    st.tuples(st.just("book"), st.lists(bookings, min_size=1, max_size=4, unique_by=lambda b: b.proc_id)),
    st.tuples(st.just("force"), st.lists(bookings, max_size=2)),
    st.tuples(st.just("settle"), st.lists(bookings, max_size=3)),
    st.tuples(st.just("rollback"), st.lists(bookings, max_size=3)),
    st.tuples(st.just("release"), st.lists(st.sampled_from(IDS), max_size=4)),
    st.tuples(st.just("reconcile"), st.tuples(st.sampled_from(IDS), st.none() | bookings, st.booleans())),
    st.tuples(st.just("forget tombstones"), st.none()),
    st.tuples(st.just("flush scripts"), st.none()),
)


class Model:
    """What the ledger should hold, by the rules alone."""

    def __init__(self) -> None:
        self.entries: dict[str, str] = {}
        self.tombs: set[str] = set()

    def add(self, booking: Booking) -> None:
        if booking.proc_id not in self.tombs:
            self.entries.setdefault(booking.proc_id, booking.packed())

    def remove(self, proc_id: str) -> None:
        self.entries.pop(proc_id, None)
        self.tombs.add(proc_id)


def apply(store: Store, model: Model, name: str, argument: object) -> None:
    ledger = store.ledger
    if name == "book":
        answers = ledger.book(argument)  # type: ignore[arg-type]
        for booking in argument:  # type: ignore[attr-defined]
            if booking.proc_id in answers.accepted:
                model.add(booking)
    elif name == "force":
        force(ledger, argument)  # type: ignore[arg-type]
        for booking in argument:  # type: ignore[attr-defined]
            model.add(booking)
    elif name == "settle":
        for booking in argument:  # type: ignore[attr-defined]
            model.add(booking)
        ledger.settle(argument)  # type: ignore[arg-type]
    elif name == "rollback":
        ledger.rollback(argument)  # type: ignore[arg-type]
        for booking in argument:  # type: ignore[attr-defined]
            model.remove(booking.proc_id)
    elif name == "release":
        known = len({proc_id for proc_id in argument if proc_id in model.entries})  # type: ignore[attr-defined]
        assert ledger.release(argument) == known  # type: ignore[arg-type]
        for proc_id in argument:  # type: ignore[attr-defined]
            model.remove(proc_id)
    elif name == "reconcile":
        reconcile(store, model, *argument)  # type: ignore[misc]
    elif name == "forget tombstones":
        for key in store.client.scan_iter(match="acct:tomb:*"):
            store.client.delete(key)
        model.tombs.clear()
    else:
        store.client.script_flush()


def reconcile(store: Store, model: Model, proc_id: str, wanted: Booking | None, stale: bool) -> None:
    """One difference, as seen now or as it was before the entry last changed."""
    known = {record.proc_id: record for record in store.ledger.records()}.get(proc_id)
    seen = None if known is None else known.changed_seq - int(stale)
    entry = None if wanted is None else wanted.packed()
    store.ledger.apply([Change(proc_id, seen, entry, EntryState.CONFIRMED)], epoch=store.ledger.epoch())
    if known is None:
        if entry is not None and proc_id not in model.tombs:
            model.entries[proc_id] = entry
    elif not stale:
        if entry is None:
            del model.entries[proc_id]
        else:
            model.entries[proc_id] = entry


@given(steps=st.lists(operations, max_size=25), dual=st.booleans())
@hypothesis_settings(
    max_examples=examples(80),
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    print_blob=True,
)
def test_counters_are_the_sum_of_their_entries_whatever_happens(
    redis_client: redis.Redis, steps: list[tuple[str, object]], dual: bool
) -> None:
    redis_client.flushdb()
    store, model = Store(redis_client), Model()
    store.open(dual=dual)
    for key, fields in CAPS.items():
        store.caps(key, **fields)
    forced = False
    for name, argument in steps:
        before = store.seq()
        held = dict(model.entries)
        apply(store, model, name, argument)
        check = check_consistency(store.ledger)
        assert {i: r.entry for i, r in check.records.items()} == model.entries
        if dual:
            counted = {key: store.client.hmget(key, "ledger_cores", "ledger_gpus") for key in check.readings}
            sums = {key: (int(c or 0), int(g or 0)) for key, (c, g) in counted.items()}  # type: ignore[misc]
            assert drift_of_ledger_fields(check, sums) == {}
        else:
            assert drift(check) == {}
        if model.entries != held:
            assert store.seq() > before, "every mutation moves the sequence"
        forced = forced or name not in ("book", "release", "rollback", "forget tombstones", "flush scripts")
        if not forced:
            assert_no_cap_is_passed(store)


def drift_of_ledger_fields(check: ConsistencyCheck, sums: dict[str, tuple[int, int]]) -> dict[str, tuple[int, int]]:
    """ledger_* against the entries, in a store where int_* may differ."""
    readings = {
        key: (seq, sums[key]) for key, (seq, _) in check.readings.items() if not key.startswith(keys.LIMIT_PREFIX)
    }
    return drift(replace(check, readings=readings))


def assert_no_cap_is_passed(store: Store) -> None:
    for key, caps in CAPS.items():
        cores, gpus = store.counter(key)
        if "burst" in caps:
            assert cores <= caps["burst"]
        elif "int_max_value" in caps:
            assert store.running(key.rpartition(":")[2]) <= max(0, caps["int_max_value"] - caps["int_foreign"])
        else:
            assert caps["int_max_cores"] <= 0 or cores <= caps["int_max_cores"]
            assert caps["int_max_gpus"] <= 0 or gpus <= caps["int_max_gpus"]
