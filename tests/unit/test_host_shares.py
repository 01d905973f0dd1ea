"""Shares of hosts between instances: a partition everybody agrees on, and a preference the planner follows."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.coordination.queues import first_hosts
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.domain.farm import Caps, Frame, Headroom, Host, Job, Layer, Snapshot, ThreadMode
from opencue_sched.domain.frames import Rules
from opencue_sched.placement.planner import Policy, plan_pass
from tests.unit.placement.frozen_pool import FrozenPool

TAGS = frozenset({"t"})
HOSTS = [f"host-{number}" for number in range(200)]


@given(st.sets(st.text("abcdef0123456789-", min_size=1, max_size=8), min_size=2, max_size=6))
def test_every_host_is_first_choice_of_exactly_one_instance(names):
    firsts = [first_hosts(name, names) for name in names]
    assert all(sum(first(host) for first in firsts) == 1 for host in HOSTS)


def test_an_instance_that_is_alone_or_unknown_has_no_preference():
    assert first_hosts("a", {"a"}) is None
    assert first_hosts("a", {"b", "c"}) is None


def test_a_leaving_instance_moves_only_its_own_hosts():
    before = set(filter(first_hosts("a", {"a", "b", "c"}), HOSTS))
    after = set(filter(first_hosts("a", {"a", "b"}), HOSTS))
    assert before < after


def plan(first, *, hosts: int, frames: int):
    host = [
        Host(f"h{n}", f"h{n}", "fac", "alloc", TAGS, ("linux",), ThreadMode.AUTO, 200, 200, 8 << 20, 8 << 20)
        for n in range(hosts)
    ]
    waiting = tuple(Frame(f"f{n}", f"{n:04d}-l", n, 0) for n in range(frames))
    layer = Layer("l", "l", "cmd", "1-9", 1, 100, 0, 1 << 20, 0, 0, TAGS, (), False, frames, waiting)
    job = Job("j", "j", "show", "show", "fac", "folder", "dept", 1, "s", "u", None, "", None, None, (layer,))
    snapshot = Snapshot((job,), {"alloc": Caps(Headroom(1000, 0), Headroom(None, 0))}, {}, {})
    ids = iter(range(10_000))
    cluster = Cluster("fac", "show", ClusterKind.ALLOC, ("t",), "alloc")
    policy = Policy(
        Rules(memory_stranded_threshold_kb=0, selfish_services=frozenset(), mem_reserved_min_kb=0), first=first
    )
    return plan_pass(snapshot, cluster, FrozenPool(host), policy, granted_layers={"l"}, new_id=lambda: f"p{next(ids)}")


def test_the_planner_fills_the_first_choice_and_then_every_other_host():
    mine = {"h3", "h7"}
    few = plan(lambda host: host in mine, hosts=10, frames=4)
    assert {proc.host.id for proc in few.procs} == mine
    many = plan(lambda host: host in mine, hosts=10, frames=20)
    assert len(many.procs) == 20
    assert {proc.host.id for proc in many.procs[:4]} == mine
