from __future__ import annotations

from opencue_sched.placement.policy import policy_for
from opencue_sched.settings import HostBookingStrategy, Queue
from tests.kit.values import make_host, make_job, make_layer, make_snapshot, plan
from tests.unit.placement.frozen_pool import FrozenPool


def test_the_default_keeps_cores_dense_and_memory_loose() -> None:
    expected = HostBookingStrategy(core_saturation=True, memory_saturation=False)

    assert Queue().host_booking_strategy == expected


def test_a_show_overrides_the_global_strategy_for_itself_only() -> None:
    preview = HostBookingStrategy(core_saturation=False, memory_saturation=False)
    policy = policy_for(Queue(host_booking_strategy_by_show={"preview": preview}))

    def host_of(show_name: str) -> str:
        pool = FrozenPool([make_host("small", cores=8), make_host("large", cores=64)])
        job = make_job(layers=[make_layer()], show_name=show_name)
        return plan(make_snapshot(job), pool, policy=policy).procs[0].host.id

    assert (host_of("preview"), host_of("feature")) == ("large", "small")
