"""No call of a script takes long: each names a bounded number of procs or vertices.

Counted in commands of Redis, which are the same on every machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import redis

from opencue_sched.accounting import keys
from opencue_sched.accounting import ledger as scripts
from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.accounting.epoch import Epoch
from opencue_sched.accounting.keys import Booking, EntryState
from opencue_sched.accounting.ledger import PROCS_PER_CALL, PROCS_PER_DUAL_CALL, VERTICES_PER_CALL, Change
from opencue_sched.clients.lua_scripts import ScriptCall, call_scripts
from opencue_sched.domain.caps import Vertices
from tests.kit.counters import Store
from tests.kit.forced import force

PROCS, LIMITS, MACHINES = 120, 12, 300
COMMANDS = 400
"""What a call does at most, in a store of ours alone and in a dual one."""

Sender = Callable[[Sequence[ScriptCall]], list[Any]]


def hard(number: int, *, elsewhere: str = "") -> Booking:
    """A proc that shares no vertex with another, under many limits."""
    ids = (f"{kind}{number}{elsewhere}" for kind in ("show", "alloc", "folder", "job", "layer", "dept"))
    limits = tuple(f"limit{number}-{i}{elsewhere}" for i in range(LIMITS))
    return Booking(f"p{number}", Vertices(*ids, limits), 2, 1)


ALL = [hard(number) for number in range(PROCS)]
IDS = [booked.proc_id for booked in ALL]
VERTICES = [key for booked in ALL for key in keys.counted(booked.vertices)]


@pytest.fixture(params=[False, True], ids=["ours alone", "dual"])
def epoch(store: Store, request: pytest.FixtureRequest) -> Epoch:
    """An open store, of either kind, while a consistency check runs: so the scripts log what they change too."""
    opened = store.open(dual=request.param)
    store.client.set(keys.AUDIT, "somebody|0")
    return opened


@pytest.fixture
def send(store: Store, epoch: Epoch) -> Sender:
    """Makes calls one by one; fails if one of them does more than it may."""

    def sent(calls: Sequence[ScriptCall]) -> list[Any]:
        answers = []
        for call in calls:
            before = commands(store.client)
            answers += call_scripts(store.client, [call])[0]
            made = commands(store.client) - before
            assert made <= COMMANDS, f"{call.name} with {len(call.args)} arguments"
        return answers

    call_scripts(store.client, scripts.settle_calls(epoch.text, ALL[:1], "warm"))
    store.ledger.release(IDS[:1])
    store.client.delete(*store.client.keys("acct:tomb:*"))
    return sent


def commands(client: redis.Redis) -> int:
    """What Redis has executed so far, inside of scripts."""
    stats: Any = client.info("commandstats")
    inside = {name: it["calls"] for name, it in stats.items() if name not in ("cmdstat_evalsha", "cmdstat_info")}
    return sum(inside.values())


def settle(send: Sender, epoch: Epoch, bookings: Sequence[Booking] = ALL) -> None:
    send(scripts.settle_calls(epoch.text, bookings, "me"))


def changes(store: Store, entries: Sequence[str | None], state: EntryState = EntryState.CONFIRMED) -> list[Change]:
    """What makes the ledger's entries these."""
    seen = {record.proc_id: record for record in store.ledger.records()}
    found = []
    for proc_id, entry in zip(IDS, entries, strict=True):
        record = seen.get(proc_id)
        expected = None if record is None else record.changed_seq
        found.append(Change(proc_id, expected, entry, state))
    return found


def reconcile(send: Sender, epoch: Epoch, wanted: Sequence[Change]) -> int:
    return sum(int(answer[2]) for answer in send(scripts.reconcile_calls(epoch.text, wanted, "me")))


def test_settling_what_the_ledger_has_lost(store: Store, epoch: Epoch, send: Sender) -> None:
    settle(send, epoch)
    assert store.ids() == set(IDS)
    assert store.counter(keys.job("job7")) == (2, 1)


def test_reconciling(store: Store, epoch: Epoch, send: Sender) -> None:
    here = [booked.packed() for booked in ALL]
    there = [hard(number, elsewhere="-moved").packed() for number in range(PROCS)]
    for entries in (here, there, [None] * PROCS):
        assert reconcile(send, epoch, changes(store, entries)) == PROCS
    assert store.ids() == set()
    store.client.delete(keys.AUDIT, keys.AUDIT_LOG)
    assert epoch.dual or drift(check_consistency(store.ledger)) == {}


def test_giving_entries_new_numbers(store: Store, epoch: Epoch, send: Sender) -> None:
    """What stays the same is no work: it changes no counter, and has nothing to tell a consistency check."""
    settle(send, epoch)
    told, counters = store.client.llen(keys.AUDIT_LOG), [store.client.hgetall(key) for key in VERTICES]
    same = changes(store, [booked.packed() for booked in ALL])
    assert reconcile(send, epoch, same) == PROCS
    assert store.client.llen(keys.AUDIT_LOG) == told
    assert [store.client.hgetall(key) for key in VERTICES] == counters
    assert min(record.changed_seq for record in store.ledger.records()) > max(it.expected_seq or 0 for it in same)


def test_releasing(store: Store, epoch: Epoch, send: Sender) -> None:
    settle(send, epoch)
    assert sum(int(answer[2]) for answer in send(scripts.id_calls("release", IDS, epoch.text))) == PROCS
    assert store.ids() == set()
    assert store.counter(keys.job("job7")) == (0, 0)


def test_a_release_of_many_ids_is_whole(store: Store, epoch: Epoch, send: Sender) -> None:
    settle(send, epoch)
    assert store.ledger.release([*IDS, *IDS[:3], "nobody"]) == PROCS
    assert store.ids() == set()
    force(store.ledger, ALL)
    assert store.ids() == set(), "each has left a tombstone"


def on_machines(number: int, *, elsewhere: str = "") -> Booking:
    """The same under limits that count machines."""
    plain = hard(number, elsewhere=elsewhere)
    limits = (token for limit in plain.vertices.limit_ids for token in keys.on_machine(limit, f"host{number}"))
    return replace(plain, vertices=replace(plain.vertices, limit_ids=tuple(limits)))


def test_under_limits_that_count_machines_a_call_leaves_what_it_has_no_time_for(
    store: Store, epoch: Epoch, send: Sender
) -> None:
    here, there = ([on_machines(number, elsewhere=where) for number in range(PROCS)] for where in ("", "-moved"))
    # when they are settled, moved and settled again, then each call leaves some, which are as they were
    waiting = here
    while waiting:
        answers = send(scripts.settle_calls(epoch.text, waiting, "me"))
        left = {proc_id for answer in answers for proc_id in answer[3]}
        assert len(left) < len(waiting)
        waiting = [booked for booked in here if booked.proc_id in left]
    assert store.ids() == set(IDS)
    for entries in ([booked.packed() for booked in there], [None] * PROCS, [booked.packed() for booked in here]):
        wanted = changes(store, entries)
        while wanted:
            answers = send(scripts.reconcile_calls(epoch.text, wanted, "me"))
            left = {proc_id for answer in answers for proc_id in answer[3]}
            assert len(left) < len(wanted)
            wanted = [change for change in wanted if change.proc_id in left]
    assert [store.machines(f"limit{number}-3") for number in range(PROCS)] == [{f"host{i}"} for i in range(PROCS)]
    # and so when they are released.
    waiting_ids, rounds = IDS, 0
    while waiting_ids:
        answers = send(scripts.id_calls("release", waiting_ids, epoch.text))
        waiting_ids, rounds = [proc_id for answer in answers for proc_id in answer[3:]], rounds + 1
    assert rounds > 1
    assert (store.ids(), store.counter(keys.job("job7"))) == (set(), (0, 0))


def test_booking_where_far_more_machines_hold_limits_than_may(store: Store, epoch: Epoch, send: Sender) -> None:
    # given as many limits as a layer may have, each held by hundreds of machines, when fewer may from now on
    limits = tuple(f"limit{number}" for number in range(LIMITS))
    for limit in limits:
        store.seats(limit, -1)
    frames = [
        Booking(f"p{number}", Vertices("", "", "", "", "", "", limits), 1, machine=f"host{number:03d}")
        for number in range(MACHINES)
    ]
    store.ledger.book(frames)
    store.ledger.settle(frames)
    for limit in limits:
        store.seats(limit, MACHINES // 2)

    # then a booking looks at few of them, and half of them go on
    more = [replace(frame, proc_id=f"{frame.proc_id}-more") for frame in frames]
    answers = [send([scripts.book_call(epoch.text, "check", frame, "me")])[0] for frame in more]
    assert [int(answer[0]) for answer in answers] == [number < MACHINES // 2 for number in range(MACHINES)]


def test_booking_beside_hundreds_of_frames_in_flight_on_its_machine(store: Store, epoch: Epoch, send: Sender) -> None:
    # given a limit that one machine holds, and 500 frames under it in flight on another, when only one may from now on
    store.seats("houdini", 2)
    vertices = Vertices("", "", "", "", "", "", ("houdini",))
    frames = [Booking(f"p{number}", vertices, 1, machine="host") for number in range(500)]
    holding = Booking("holding", vertices, 1, machine="other")
    force(store.ledger, [holding, *frames])
    store.ledger.settle([holding])
    store.seats("houdini", 1)

    def started(proc_id: str) -> bool:
        more = Booking(proc_id, vertices, 1, machine="host")
        return bool(int(send([scripts.book_call(epoch.text, "check", more, "me")])[0][0]))

    # then another is refused, since nothing says that they will run, and goes on once one of them does
    assert not started("early")
    store.ledger.settle(frames[:1])
    assert started("late")


def test_the_ledger_goes_on_with_what_calls_have_left(store: Store, epoch: Epoch) -> None:
    bookings = [on_machines(number) for number in range(PROCS)]
    store.ledger.settle(bookings)
    assert store.ids() == set(IDS)
    there = [on_machines(number, elsewhere="-moved").packed() for number in range(PROCS)]
    passed_over, _ = store.ledger.apply(changes(store, there), epoch=epoch)
    assert passed_over == []
    assert {record.entry for record in store.ledger.records()} == set(there)
    assert store.ledger.release(IDS) == PROCS
    assert store.ids() == set()


def test_caps_counters_and_keys(store: Store, epoch: Epoch, send: Sender) -> None:
    settle(send, epoch)
    row = [text for i in range(12) for text in (f"field{i}", "1")]
    send(scripts.caps_calls(epoch.text, "test|7", [(key, row) for key in VERTICES]))
    hierarchy = [key for key in VERTICES if not key.startswith(keys.LIMIT_PREFIX)]
    read = send(scripts.id_calls("inventory", VERTICES, epoch.text))
    assert sum(len(answer) - 2 for answer in read) == 2 * len(VERTICES)
    corrected = send(scripts.adjust_calls(epoch.text, "somebody", [(key, 1, 1) for key in VERTICES]))
    assert [answer[2] for answer in corrected] == [1] * len(corrected), "it is one correction, in however many calls"
    for phase in ("before", "after"):
        send(scripts.id_calls("foreign", hierarchy, epoch.text, phase, 0))
    send(scripts.reseed_cas_calls(epoch.text, store.seq(), [(key, 0, 0) for key in hierarchy]))
    freed = send(scripts.id_calls("free", hierarchy, epoch.text, "idle"))
    assert sum(int(answer[1]) for answer in freed) == len(hierarchy)
    send(scripts.id_calls("free", VERTICES, epoch.text, "all"))
    assert not store.client.exists(*VERTICES)


def test_no_call_names_more_than_it_may(epoch: Epoch) -> None:
    light = [Booking(str(number), Vertices("", "", "", "", "", ""), 1) for number in range(2000)]
    ids = [booked.proc_id for booked in light]
    settled, released = scripts.settle_calls(epoch.text, light, "me"), scripts.id_calls("release", ids, epoch.text)
    procs = PROCS_PER_DUAL_CALL if epoch.dual else PROCS_PER_CALL
    assert max(len(call.args) for call in settled) == 2 + 4 * procs
    assert max(len(call.args) for call in released) == 1 + procs
    moved = scripts.reconcile_calls(epoch.text, [Change(it.proc_id, 1, it.packed()) for it in light], "me")
    assert max(len(call.args) for call in moved) == 2 + 4 * (procs // 2), "each may be counted out and in"
    assert max(len(call.args) for call in scripts.id_calls("free", ids, epoch.text, "all")) == 2 + VERTICES_PER_CALL


def test_the_parts_of_a_swap_are_each_a_compare_and_swap(store: Store, epoch: Epoch, send: Sender) -> None:
    """A booking between two parts: what was written before it was right, and nothing is written after it."""
    settle(send, epoch)
    hierarchy = [key for key in VERTICES if not key.startswith(keys.LIMIT_PREFIX)]
    parts = scripts.reseed_cas_calls(epoch.text, store.seq(), [(key, 2, 1) for key in hierarchy])
    assert len(parts) > 2
    first, *rest = parts
    assert send([first])[0][0] == 1
    force(store.ledger, [Booking("late", ALL[0].vertices, 5), Booking("later", ALL[-1].vertices, 5)])
    assert [answer[:2] for answer in send(rest)] == [[0, "retry"]] * len(rest)
    assert store.counter(keys.job("job0")) == (7, 1)
    assert store.counter(keys.job(f"job{PROCS - 1}")) == (7, 1)
