"""Any order of what may happen to two limits of machines and one of frames, reported or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, example, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from opencue_sched.accounting.consistency import check_consistency, drift
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Change
from tests.integration.accounting.seats import book, on
from tests.kit.counters import Store
from tests.kit.examples import examples
from tests.kit.forced import force
from tests.kit.mutants import changed_script

_LIMITS, _MACHINES = ("nuke", "ocula", "arnold"), ("r1", "r2", "r3", "")
_OLD, _YOUNG_SINCE = 1000, 500
_STEPS = st.one_of(
    st.tuples(st.just("book"), st.sampled_from(_MACHINES), st.sets(st.sampled_from(_LIMITS), min_size=1)),
    st.tuples(st.just("force"), st.sampled_from(_MACHINES), st.sets(st.sampled_from(_LIMITS), min_size=1)),
    st.tuples(st.sampled_from(["roll back", "release", "confirm", "drop", "move", "age"]), st.integers(0, 9)),
    st.tuples(
        st.just("seats"),
        st.sampled_from(_LIMITS[:2]),
        st.integers(-1, 3),
        st.sets(st.sampled_from(_MACHINES[:3])),
        st.sets(st.sampled_from(_MACHINES[:3])),
        st.integers(0, 2),
        st.booleans(),
    ),
    st.tuples(st.just("frames"), st.integers(-1, 4), st.integers(0, 2), st.booleans()),
)
_NOBODY: frozenset[str] = frozenset()
_NUKE = frozenset({"nuke"})
_TOLD = (
    # An old frame on a reported machine, a young one on another, and one machine too many.
    (
        ("seats", "nuke", 3, _NOBODY, _NOBODY, 0, False),
        *(("book", machine, _NUKE) for machine in ("r3", "r1")),
        *(("confirm", 0), ("confirm", 1), ("age", 0)),
        ("seats", "nuke", 1, {"r3"}, _NOBODY, 0, True),
        *(("book", machine, _NUKE) for machine in ("r1", "r3", "r2")),
    ),
    # A machine too many is reported still after its last frame has ended.
    (
        ("seats", "nuke", 2, _NOBODY, _NOBODY, 0, False),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
        ("release", 1),
        ("seats", "nuke", 1, {"r1", "r2"}, _NOBODY, 0, True),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
    ),
    # A machine whose frame is old and not reported has given its licence back.
    (
        ("book", "r1", _NUKE),
        *(("confirm", 0), ("age", 0)),
        ("seats", "nuke", 1, _NOBODY, _NOBODY, 0, True),
        *(("book", machine, _NUKE) for machine in ("r2", "r3", "r1")),
    ),
    # So has an old frame under a limit of frames.
    (("frames", 2, 0, True), ("book", "r1", {"arnold"}), ("age", 0), *(("book", "r1", {"arnold"}) for _ in range(3))),
    # A young frame that has ended waits for no report any more, beside an old one that runs on.
    (
        ("frames", 2, 0, True),
        *(("book", "r1", {"arnold"}), ("age", 0)),
        *(("book", "r1", {"arnold"}), ("release", 1)),
        *(("book", "r1", {"arnold"}) for _ in range(2)),
    ),
    # A machine with frames in flight alone holds a limit no more than one without, where it is lowered meanwhile.
    (
        ("seats", "nuke", 2, _NOBODY, _NOBODY, 0, False),
        *(("book", machine, _NUKE) for machine in ("r1", "r2", "r2")),
        ("seats", "nuke", 1, _NOBODY, _NOBODY, 0, False),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
        ("confirm", 0),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
    ),
    # A machine counts by its youngest frame, and one with an old one in flight alone does not.
    (
        *(("book", "r1", _NUKE), ("confirm", 0), ("age", 0)),
        ("seats", "nuke", 1, _NOBODY, _NOBODY, 0, True),
        *(("book", machine, _NUKE) for machine in ("r1", "r2")),
    ),
    (
        *(("book", "r1", _NUKE), ("age", 0)),
        ("seats", "nuke", 1, {"r3"}, _NOBODY, 0, True),
        ("book", "r1", _NUKE),
    ),
    # Any number of frames.
    (("frames", -1, 0, True), ("book", "r1", {"arnold"})),
    # A frame that no report knows takes a licence beside those that one counts; so do the ones counted alone.
    (("book", "r1", {"arnold"}), ("frames", 1, 0, True), ("book", "r1", {"arnold"})),
    (("frames", 1, 1, True), ("book", "r1", {"arnold"})),
    # A machine that is past starts nothing, and a frame without a machine holds a limit of one.
    (("seats", "nuke", 0, _NOBODY, {"r1"}, 0, False), ("book", "r1", _NUKE)),
    (("book", "", _NUKE), ("book", "r1", _NUKE)),
)
"""What a search comes upon rarely."""


@dataclass
class Terms:
    """How a limit counts by now: so many may hold it, what the ledger has not, and whether it was reported."""

    most: int
    others: set[str] = field(default_factory=set)
    past: set[str] = field(default_factory=set)
    maximum: int = 0
    reported: bool = False
    settled: int = 0


@dataclass
class Expected:
    """What should be booked, said anew: sets of machines and sums of frames, and nothing that is moved along."""

    limits: dict[str, Terms]
    booked: dict[str, Booking] = field(default_factory=dict)
    confirmed: set[str] = field(default_factory=set)
    aged: set[str] = field(default_factory=set)
    dated: set[tuple[str, str]] = field(default_factory=set)
    """Frames and limits of frames that were reported when they were booked."""
    left: set[tuple[str, str]] = field(default_factory=set)
    """Limits and machines whose last frame has ended."""

    def of(self, limit: str) -> list[Booking]:
        return [booked for booked in self.booked.values() if limit in booked.vertices.limit_ids]

    def machines(self, limit: str) -> set[str]:
        return {booked.machine for booked in self.of(limit) if booked.machine}

    def counts(self, limit: str, booked: Booking) -> bool:
        """Whether a frame counts beside a report."""
        known = booked.machine or limit == "arnold"
        dated = limit != "arnold" or (booked.proc_id, limit) in self.dated
        return not (self.limits[limit].reported and known and dated and booked.proc_id in self.aged)

    def refuses(self, limit: str, machine: str) -> bool:
        terms, young = self.limits[limit], [booked for booked in self.of(limit) if self.counts(limit, booked)]
        if limit == "arnold":
            return terms.most >= 0 and terms.settled + len(young) >= terms.most
        counted = {booked.machine for booked in young if booked.machine} | terms.others
        use = len(counted) + sum(not booked.machine for booked in young)
        if terms.most < 0 or use < terms.most:
            return False
        running = {booked.machine for booked in self.of(limit) if booked.proc_id in self.confirmed}
        if machine not in running | terms.others | terms.past or not machine:
            alone = bool(machine) and machine in counted - terms.others
            return use - alone >= terms.most
        too_many = use - terms.maximum
        if too_many <= 0:
            return False
        left = {name for of, name in self.left if of == limit and terms.reported}
        ours = sorted((counted - terms.others) | (terms.others & (self.machines(limit) | left)))
        return machine not in ours[: max(0, len(ours) - too_many)]

    def change(self, change: Callable[[], object]) -> None:
        """Do it, and note which machines have no frame any more."""
        before = {(limit, machine) for limit in self.limits for machine in self.machines(limit)}
        change()
        after = {(limit, machine) for limit in self.limits for machine in self.machines(limit)}
        self.left = (self.left | before) - after


@example(_TOLD[0])
@example(_TOLD[1])
@example(_TOLD[2])
@example(_TOLD[3])
@example(_TOLD[4])
@example(_TOLD[5])
@example(_TOLD[6])
@example(_TOLD[7])
@example(_TOLD[8])
@example(_TOLD[9])
@example(_TOLD[10])
@example(_TOLD[11])
@example(_TOLD[12])
@given(st.lists(_STEPS, max_size=25))
@hypothesis_settings(
    max_examples=examples(60), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]
)
def test_machines_are_the_hosts_of_the_entries_whatever_happens(store: Store, steps: Sequence[tuple[Any, ...]]) -> None:
    store.client.flushdb()
    store.open()
    store.seed()
    limits = {"nuke": Terms(1, maximum=1), "ocula": Terms(2, {"r3"}, maximum=2), "arnold": Terms(4)}
    expected = Expected(limits)
    for limit in _LIMITS[:2]:
        store.seats(limit, limits[limit].most, limits[limit].others)
    store.frames("arnold", 4)
    booked = expected.booked

    def book_(asked: Booking) -> None:
        booked[asked.proc_id] = asked
        expected.dated |= {(asked.proc_id, "arnold")} if limits["arnold"].reported else set()

    def step(what: str, *rest: Any) -> None:
        if what in ("book", "force"):
            asked = on(rest[0], *sorted(rest[1]))
            if what == "force":
                force(store.ledger, [asked])
                return book_(asked)
            accepted = not any(expected.refuses(limit, rest[0]) for limit in rest[1])
            assert book(store, asked) == [accepted], (steps, asked)
            return book_(asked) if accepted else None
        if what == "seats":
            limit, most, others, past, more, reported = rest
            maximum = max(0, most) + more
            limits[limit] = Terms(most, others, past, maximum, reported)
            after = store.now() - _YOUNG_SINCE if reported else None
            return store.seats(limit, most, others, past=past, maximum=maximum, after=after)
        if what == "frames":
            most, settled, reported = rest
            limits["arnold"] = Terms(most if reported else max(0, most), settled=settled * reported, reported=reported)
            return store.frames("arnold", most, settled, store.now() - _YOUNG_SINCE if reported else None)
        if not booked:
            return None
        taken = list(booked.values())[rest[0] % len(booked)]
        (record,) = store.ledger.records_of([taken.proc_id])
        if what == "confirm":
            store.ledger.settle([taken])
            expected.confirmed.add(taken.proc_id)
        elif what == "age":
            store.age(taken.proc_id, _OLD)
            expected.aged.add(taken.proc_id)
            expected.left |= {
                (limit, taken.machine) for limit in _LIMITS[:2] if limit in taken.vertices.limit_ids and taken.machine
            } - {(limit, machine) for limit in _LIMITS for machine in expected.machines(limit)}
        elif what == "roll back":
            store.ledger.rollback([booked.pop(taken.proc_id)])
        elif what == "release":
            store.ledger.release([booked.pop(taken.proc_id).proc_id])
        elif what == "drop":
            del booked[taken.proc_id]
            gone = Change(taken.proc_id, record.changed_seq, None)
            store.ledger.apply([gone], epoch=store.ledger.epoch())
        elif taken.machine:
            there = record.entry.replace(f"@{taken.machine}", "@r9")
            booked[taken.proc_id] = replace(taken, machine="r9")
            moved = Change(taken.proc_id, record.changed_seq, there, record.state)
            store.ledger.apply([moved], epoch=store.ledger.epoch())
        return None

    for taken in steps:
        expected.change(partial(step, *taken))
        for limit in _LIMITS[:2]:
            assert store.machines(limit) == expected.machines(limit), (limit, steps)
    check = check_consistency(store.ledger)
    assert (drift(check), check.wrong_machines) == ({}, [])


@pytest.mark.parametrize(
    ("path", "ours", "mistake"),
    [
        (
            "includes/seats.lua",
            "if use < threshold then return end\n  -- A machine",
            "if use <= threshold then return end\n  -- A machine",
        ),
        ("includes/seats.lua", "runs or reported or", "runs or"),
        ("includes/seats.lua", "local runs = frames > 0 and runs_there(limit, machine)", "local runs = frames > 0"),
        ("includes/seats.lua", "use - (counted_alone and 1 or 0) < threshold", "use < threshold"),
        ("includes/seats.lua", "local runs = frames > 0 and", "local runs = frames > 1 and"),
        ("includes/seats.lua", "      use = use - 1\n    elseif", "    elseif"),
        ("includes/seats.lua", "+ math.max(0, unknown)", ""),
        ("includes/seats.lua", "+ call('SCARD', others)", ""),
        ("includes/seats.lua", "call('SISMEMBER', holding .. ':past', machine) == 1", "false"),
        ("includes/seats.lua", "if use <= maximum then return end\n  -- Ours", "if true then return end\n  -- Ours"),
        ("includes/seats.lua", "#ours - (use - maximum)", "#ours - (use - maximum) + 1"),
        ("includes/seats.lua", "  table.sort(ours)\n", ""),
        ("includes/seats.lua", "since > 0 or (after", "(after"),
        ("includes/seats.lua", "-since > tonumber(after)", "false"),
        ("book.lua", "try('ZADD', 'acct:machines:' .. limit, 'GT', now, machine)", "local _"),
        ("book.lua", "note_start(id, ARGV[13], now)", "local _"),
        ("includes/seats.lua", "call('ZCOUNT', holding, bound, '+inf')", "call('ZCOUNT', holding, '(0', '+inf')"),
        ("includes/seats.lua", "settled + pending", "pending"),
        ("includes/seats.lua", "pending + math.max(0, running - known)", "pending"),
        ("includes/seats.lua", "'(' .. after, '+inf')", "0, '+inf')"),
        ("includes/machines.lua", "last[2] or clock()", "clock()"),
        ("includes/machines.lua", "if key and booked then", "if false then"),
        ("includes/machines.lua", "try('ZADD', machines, '-' .. clock(), machine)", "local _"),
        ("includes/machines.lua", "try('ZREM', key, id)", "local _"),
        ("includes/machines.lua", "type(sum) == 'table' or sum > 0", "sum ~= 1"),
    ],
)
def test_each_rule_left_out_is_found(store: Store, path: str, ours: str, mistake: str) -> None:
    """The control of the test above: the script is broken on purpose, and that test fails."""
    inner = test_machines_are_the_hosts_of_the_entries_whatever_happens.hypothesis.inner_test
    search = hypothesis_settings(
        max_examples=400,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )
    with changed_script(path, {ours: mistake}), pytest.raises((AssertionError, ResponseError)):
        for steps in _TOLD:
            inner(store, steps)
        search(given(st.lists(_STEPS, max_size=25))(lambda steps: inner(store, steps)))()
