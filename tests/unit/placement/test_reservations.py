"""Reservations with backfill: who asks, which host is granted, and who may use a held host."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.frame_needs import Demand, Search, smallest_need
from opencue_sched.domain.hosts import Host, Reservation, Resources
from opencue_sched.domain.verdicts import Verdict
from opencue_sched.placement.policies import reservations as policy
from opencue_sched.placement.policies.reservations import RunningFrame, WideLayer
from tests.kit.values import GIB, make_host, make_job, make_layer, make_policy, make_snapshot, plan
from tests.unit.placement.frozen_pool import FrozenPool

NOW = 1_000_000.0
BLOCK = 300.0


def reservation_of(
    layer: str = "wide", *, cores: int = 8, until: float = NOW + 60, free_at: float | None = NOW + 240
) -> Reservation:
    return Reservation(layer, "job-" + layer, cores, 0, 0, until, free_at)


def demand_of(*, cores: float = 8, waiting: int = 10, **needs) -> Demand:
    made = make_layer(cores=cores, **needs)
    search = Search.of(make_job(), made, smallest_need(made), tuple(made.tags))
    return Demand("fac", search, frozenset({"alloc"}), waiting)


def asked_of(
    layer: str = "wide", *, priority: int = 100, blocked: float = BLOCK, hosts: int = 100, **demand
) -> WideLayer:
    return WideLayer(layer, "job-" + layer, priority, demand_of(**demand), blocked, hosts)


def held(host: Host, layer: str = "other") -> Host:
    return make_host(host.id, reservation=reservation_of(layer))


def admitted(host: Host, *, layer: str = "narrow", run_seconds: float | None = 60.0) -> Verdict | None:
    narrow = make_layer(layer, run_seconds=run_seconds)
    refusal = policy.reservations(NOW)(make_job(), narrow, host, Resources(1, GIB))
    return None if refusal is None else refusal.verdict


def idle(cores: int, hold: Reservation | None) -> Host:
    return make_host("h1", cores=16, idle_centicores=cores * 100, reservation=hold)


# Who may use a held host.


def test_a_host_without_a_hold_takes_everybody():
    assert admitted(idle(1, None), run_seconds=None) is None


def test_the_owner_may_always_use_its_host():
    assert admitted(idle(1, reservation_of("wide")), layer="wide", run_seconds=None) is None


def test_nobody_else_uses_a_host_that_has_not_drained():
    assert admitted(idle(7, reservation_of(cores=8))) is Verdict.HELD
    assert admitted(idle(8, reservation_of(cores=8))) is None


@pytest.mark.parametrize(
    ("run_seconds", "free_at", "may"),
    [
        (239.0, NOW + 240, True),
        (240.0, NOW + 240, False),
        (None, NOW + 240, False),
        (1.0, None, False),
        (1.0, NOW, False),
    ],
)
def test_others_use_a_drained_host_only_if_they_end_before_it_is_free(run_seconds, free_at, may):
    verdict = admitted(idle(16, reservation_of(cores=8, free_at=free_at)), run_seconds=run_seconds)
    assert verdict is (None if may else Verdict.HELD)


def test_a_hold_that_ran_out_keeps_nobody_away():
    assert admitted(idle(1, reservation_of(until=NOW))) is None


def test_the_refusal_says_for_whom_and_how_long():
    narrow = make_layer("narrow", run_seconds=600.0)
    host = idle(16, Reservation("wide", "j", 8, 0, 0, NOW + 60, NOW + 240, "shot/comp"))
    refusal = policy.reservations(NOW)(make_job(), narrow, host, Resources(1, GIB))
    assert refusal is not None
    assert refusal.verdict is Verdict.HELD
    assert all(fact in refusal.detail for fact in (host.name, "shot/comp", "4m"))


def test_the_owner_is_told_which_host_drains_and_when_it_is_free():
    soon, some_day = idle(3, reservation_of("wide")), make_host("h2", reservation=reservation_of("wide", free_at=None))
    told = policy.draining([soon], NOW)
    assert told is not None
    assert told == policy.draining([some_day, soon], NOW)
    assert told[0] is Verdict.DRAINING
    assert all(fact in told[1] for fact in (soon.name, "4m"))
    told = policy.draining([some_day], NOW)
    assert told is not None
    assert told[0] is Verdict.DRAINING
    assert some_day.name in told[1]
    assert policy.draining([idle(3, reservation_of("wide", until=NOW))], NOW) is None


@given(
    idle_cores=st.integers(0, 16),
    need=st.integers(1, 16),
    run=st.none() | st.floats(0, 1000),
    free_in=st.none() | st.floats(-100, 1000),
    lives=st.floats(-10, 100),
    owner=st.booleans(),
)
def test_a_held_host_is_used_by_the_backfill_rule_and_no_other(idle_cores, need, run, free_in, lives, owner):
    free_at = None if free_in is None else NOW + free_in
    hold = reservation_of("wide", cores=need, until=NOW + lives, free_at=free_at)
    verdict = admitted(idle(idle_cores, hold), layer="wide" if owner else "narrow", run_seconds=run)
    backfills = idle_cores >= need and run is not None and free_at is not None and NOW + run < free_at
    assert (verdict is None) == (owner or hold.until <= NOW or backfills)


# Who asks.


@pytest.mark.parametrize(
    ("needs", "wide"),
    [
        ({"cores": 16}, True),
        ({"cores": 15}, False),
        ({"cores": 1, "memory_gib": 64}, True),
        ({"cores": 1, "memory_gib": 63}, False),
        ({"cores": 1, "gpus_min": 2}, True),
        ({"cores": 1, "gpus_min": 1}, False),
        ({"cores": 0}, True),
        ({"cores": 33}, False),
    ],
)
def test_wide_is_what_needs_half_of_the_largest_host_in_anything(needs, wide):
    kinds = [(make_host(cores=32, memory_gib=128, idle_gpus=4), 3), (make_host(cores=16, memory_gib=64), 10)]
    assert bool(policy.hosts_of_a_wide_layer(demand_of(**needs), kinds)) == wide


def test_only_hosts_that_could_ever_take_it_count():
    large = make_host(cores=128, memory_gib=512)
    for other in ({"tags": frozenset({"x"})}, {"alloc_id": "x"}, {"facility_id": "x"}, {"os_names": ("windows",)}):
        kinds = [(make_host(cores=128, memory_gib=512, **other), 5), (make_host(cores=8), 3)]
        assert policy.hosts_of_a_wide_layer(demand_of(cores=8), kinds) == 3
    assert policy.hosts_of_a_wide_layer(demand_of(cores=8), [(large, 5)]) == 0
    assert policy.hosts_of_a_wide_layer(demand_of(cores=8), []) == 0


def test_blocked_seconds_grow_while_nothing_is_placed_and_halve_when_something_is():
    grown = policy.blocked_after(100, 5, placed=False, may_run=True, block_seconds=BLOCK)
    assert grown == 105
    assert policy.blocked_after(100, 5, placed=True, may_run=True, block_seconds=BLOCK) == 50
    assert policy.blocked_after(100, 5, placed=False, may_run=False, block_seconds=BLOCK) == 100, (
        "a cap keeps it waiting"
    )


@given(steps=st.lists(st.tuples(st.floats(-10, 1e6), st.booleans(), st.booleans())))
def test_blocked_seconds_are_bounded_and_an_absent_task_counts_for_little(steps):
    blocked = 0.0
    for elapsed, placed, may_run in steps:
        before = blocked
        blocked = policy.blocked_after(blocked, elapsed, placed=placed, may_run=may_run, block_seconds=BLOCK)
        assert 0 <= blocked <= policy.MOST_HOSTS_OF_A_LAYER * BLOCK
        assert blocked <= before + policy.LONGEST_ELAPSED_SECONDS


def test_a_layer_is_due_a_host_for_each_block_time_it_was_blocked_and_never_more_than_its_frames():
    def asks(blocked: float, holds: int = 0, **demand) -> bool:
        mine = [reservation_of("wide")] * holds
        return bool(policy.due_a_host([asked_of(blocked=blocked, **demand)], mine, block_seconds=BLOCK, now=NOW))

    assert not asks(BLOCK - 1)
    assert asks(BLOCK)
    assert not asks(BLOCK, 1)
    assert asks(2 * BLOCK, 1)
    assert not asks(2 * BLOCK, 1, waiting=1)
    assert not asks(100 * BLOCK, policy.MOST_HOSTS_OF_A_LAYER)
    assert not asks(BLOCK, hosts=1), "there is no half of one host"


@given(
    holders=st.lists(st.integers(0, 12), max_size=14),
    askers=st.lists(st.tuples(st.integers(0, 20), st.floats(0, 2000)), max_size=20, unique_by=lambda it: it[0]),
    now=st.floats(0, 1e9),
)
def test_never_more_than_eight_layers_of_the_farm(holders, askers, now):
    holds = [reservation_of(f"l{number}") for number in dict.fromkeys(holders)][: policy.MOST_LAYERS]
    asked = [asked_of(f"l{number}", blocked=blocked) for number, blocked in askers]
    asking = policy.due_a_host(asked, holds, block_seconds=BLOCK, now=now)
    layers = {hold.layer_id for hold in holds} | {it.layer_id for it in asking}
    assert len(layers) <= policy.MOST_LAYERS
    assert asking == policy.due_a_host(asked[::-1], holds, block_seconds=BLOCK, now=now), "the same for everybody"


def test_among_those_that_ask_chances_follow_priority():
    asked = [asked_of("low", priority=100), asked_of("high", priority=300)]
    epochs = range(2000)
    first = Counter(
        policy.due_a_host(asked, (), block_seconds=BLOCK, now=epoch * policy.DRAW_SECONDS)[0].layer_id
        for epoch in epochs
    )
    assert 0.70 < first["high"] / len(epochs) < 0.80


# Which host.


def run(ends_in: float | None, cores: int = 4) -> RunningFrame:
    return RunningFrame(None if ends_in is None else NOW + ends_in, cores * 100, GIB, 0)


def candidate(host_id: str, *runs: RunningFrame, **host) -> tuple[Host, tuple[RunningFrame, ...]]:
    used = sum(it.centicores for it in runs)
    return make_host(host_id, cores=16, idle_centicores=1600 - used, **host), runs


def granted(
    *candidates: tuple[Host, tuple[RunningFrame, ...]], asked: WideLayer | None = None, hold: tuple[Host, ...] = ()
) -> dict[str, Reservation]:
    asked, hosts = asked or asked_of(cores=8), [host for host, _ in candidates]
    runs = {host.id: those for host, those in candidates}
    return policy.grants([asked], hold, {asked.layer_id: hosts}, runs, now=NOW)


def test_the_host_that_is_expected_free_first_drains():
    soon = candidate("soon", run(100), run(50), run(500), run(900))
    late = candidate("late", run(10), run(300), run(400), run(400))
    assert granted(late, soon) == {
        "soon": Reservation("wide", "job-wide", 8, GIB, 0, NOW + policy.RESERVATION_SECONDS, NOW + 100)
    }


def test_a_frame_without_history_ends_late_and_one_that_is_overdue_now():
    unknown = candidate("unknown", run(None), run(None), run(None), run(1))
    assert granted(unknown, candidate("b", *[run(999)] * 4)).keys() == {"b"}
    assert granted(unknown)["unknown"].free_at is None
    assert granted(candidate("overdue", run(-500), run(-5), run(700), run(700)))["overdue"].free_at == NOW


def test_of_hosts_of_which_nothing_is_known_the_one_with_the_most_idle_drains():
    assert granted(candidate("full", *[run(None)] * 4), candidate("emptier", *[run(None)] * 3)).keys() == {"emptier"}


def test_a_held_host_or_one_that_could_never_take_the_frame_is_not_granted():
    small = make_host("small", cores=4), ()
    taken = candidate("taken")
    assert granted(small, taken, hold=(held(taken[0]),)) == {}


def test_at_most_half_of_the_hosts_that_could_take_it_are_held():
    others = [make_host(f"o{number}", cores=16, reservation=reservation_of("other")) for number in range(4)]
    elsewhere = [
        make_host(f"e{number}", cores=16, tags=frozenset({"x"}), reservation=reservation_of("x")) for number in range(9)
    ]
    assert granted(candidate("new"), asked=asked_of(cores=8, hosts=9), hold=(*others, *elsewhere)) == {}
    assert granted(candidate("new"), asked=asked_of(cores=8, hosts=10), hold=(*others, *elsewhere)) != {}


@given(
    st.lists(st.tuples(st.none() | st.integers(-50, 500), st.integers(1, 4)), max_size=8),
    st.integers(0, 16),
    st.integers(1, 16),
)
def test_a_host_is_free_when_enough_of_its_frames_have_ended(runs, idle_cores, need_cores):
    host = make_host("h", cores=16, idle_centicores=idle_cores * 100)
    those = tuple(run(ends, cores) for ends, cores in runs)
    need = demand_of(cores=need_cores).need_on(host)
    assert need is not None
    free_at = policy.free_at(host, those, need, NOW)

    def idle_by(when: float) -> int:
        return idle_cores + sum(it.centicores // 100 for it in those if it.ends_at is not None and it.ends_at <= when)

    if free_at is None:
        assert idle_by(NOW + 10_000) < need_cores
    else:
        assert free_at >= NOW
        assert idle_by(free_at) >= need_cores
        assert free_at == NOW or idle_by(free_at - 0.5) < need_cores


# When a hold ends.


def test_a_hold_ends_when_its_demand_is_gone():
    kept = [
        make_host(f"h{number}", cores=16, reservation=reservation_of("wide", free_at=NOW + number))
        for number in range(3)
    ]
    demands = {"wide": demand_of(cores=8, waiting=2)}
    assert policy.ended(kept, demands) == {"h2"}, "two frames wait, three hosts drain"
    assert policy.ended(kept, {}) == {"h0", "h1", "h2"}
    assert policy.ended([make_host("h9", cores=4, reservation=reservation_of("wide"))], demands) == {"h9"}
    assert policy.ended([make_host("h9", cores=16)], demands) == {"h9"}, "its hold counts no more"


# In a plan.


def plan_of(*layers, hosts, now: float = NOW):
    rules = make_policy(admissions=(policy.reservations(now),))
    return plan(make_snapshot(make_job("j", layers), now=now), FrozenPool(hosts), policy=rules)


def test_a_plan_keeps_off_a_host_that_drains_and_says_for_whom():
    held, full = (
        make_host("h1", cores=16, idle_centicores=400, reservation=reservation_of("wide")),
        make_host("h2", cores=0),
    )
    made = plan_of(make_layer("narrow", frames=2, cores=2), make_layer("wide", frames=1, cores=8), hosts=[held, full])
    assert made.procs == []
    narrow, wide = made.verdicts
    assert (narrow.verdict, narrow.waiting) == (Verdict.HELD, 2)
    assert all(fact in narrow.detail for fact in (held.name, "layer wide", "4m"))
    assert wide.verdict is Verdict.DRAINING
    assert all(fact in wide.detail for fact in (held.name, "4m"))


def test_the_owner_gets_what_has_drained_though_others_come_first():
    held = make_host("h1", cores=16, reservation=reservation_of("wide", cores=12))
    made = plan_of(make_layer("narrow", frames=9, cores=4), make_layer("wide", frames=1, cores=12), hosts=[held])
    assert [proc.layer.id for proc in made.procs] == ["wide"]


def test_frames_that_end_in_time_fill_a_drained_host_until_what_is_reserved_is_touched():
    held = make_host("h1", cores=16, reservation=reservation_of("wide", cores=12))
    made = plan_of(make_layer("short", frames=9, cores=4, run_seconds=60.0), hosts=[held])
    assert len(made.procs) == 2, "of 16 idle cores 12 are reserved: the third would find 8"
