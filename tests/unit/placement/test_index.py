"""The host index against a naive sort, and its bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.placement.host_index import HostIndex
from opencue_sched.settings import HostBookingStrategy
from tests.kit.values import GIB, make_host, make_need

DIVISOR = 2 * GIB
STRATEGIES = [
    HostBookingStrategy(core_saturation=cores, memory_saturation=memory)
    for cores, memory in product((True, False), (True, False))
]


def idle_hosts(count: int = 30) -> st.SearchStrategy[list[Host]]:
    """Hosts with idle amounts small enough that ties, shared buckets and bucket boundaries are common."""
    amounts = st.tuples(
        st.integers(-50, 650),
        st.integers(0, 8 * 4).map(lambda quarters: quarters * GIB // 4),
        st.integers(0, 3),
        st.sampled_from([0, GIB, 8 * GIB]),
    )
    return st.lists(amounts, max_size=count).map(
        lambda rows: [
            make_host(
                f"h{number}",
                cores=8,
                idle_centicores=centicores,
                idle_memory_kb=memory_kb,
                idle_gpus=gpus,
                idle_gpu_memory_kb=gpu_memory_kb,
            )
            for number, (centicores, memory_kb, gpus, gpu_memory_kb) in enumerate(rows)
        ]
    )


needs = st.builds(
    Resources,
    st.integers(1, 6),
    st.integers(0, 8 * 4).map(lambda quarters: quarters * GIB // 4),
    st.integers(0, 3),
    st.sampled_from([0, GIB, 4 * GIB]),
)


def index_of(hosts: list[Host]) -> HostIndex:
    index = HostIndex(memory_key_divisor_kb=DIVISOR)
    for host in hosts:
        index.add(host)
    return index


def candidates(index: HostIndex, need: Resources, strategy: HostBookingStrategy) -> Iterator[Host]:
    return (host for _, host in index.ranked(need, strategy))


def feasible(host: Host, need: Resources) -> bool:
    return (
        host.idle_cores >= need.cores
        and host.idle_memory_kb >= need.memory_kb
        and host.idle_gpus >= need.gpus
        and host.idle_gpu_memory_kb >= need.gpu_memory_kb
    )


def naive_rank(host: Host, strategy: HostBookingStrategy) -> tuple[int, int, int]:
    """What the order may depend on, apart from ties."""
    gpu_level = host.idle_gpus + 1 if host.idle_gpus or host.idle_gpu_memory_kb else 0
    cores = host.idle_cores if strategy.core_saturation else -host.idle_cores
    bucket = host.idle_memory_kb // DIVISOR
    return gpu_level, cores, bucket if strategy.memory_saturation else -bucket


@given(hosts=idle_hosts(), need=needs, strategy=st.sampled_from(STRATEGIES))
def test_candidates_are_the_feasible_hosts_in_the_order_of_a_naive_sort(
    hosts: list[Host], need: Resources, strategy: HostBookingStrategy
) -> None:
    found = list(candidates(index_of(hosts), need, strategy))

    assert sorted(host.id for host in found) == sorted(host.id for host in hosts if feasible(host, need))
    ranks = [naive_rank(host, strategy) for host in found]
    assert ranks == sorted(ranks)


@given(hosts=idle_hosts(12), need=needs, strategy=st.sampled_from(STRATEGIES), data=st.data())
def test_updates_and_removals_leave_no_ghosts(
    hosts: list[Host], need: Resources, strategy: HostBookingStrategy, data: st.DataObject
) -> None:
    # given an index whose hosts changed several times
    index = index_of(hosts)
    current = {host.id: host for host in hosts}
    for host in data.draw(st.lists(st.sampled_from(hosts), max_size=20)) if hosts else []:
        if data.draw(st.booleans()):
            index.remove(host.id)
            current.pop(host.id, None)
            continue
        changed = replace(
            host,
            idle_centicores=data.draw(st.integers(0, 600)),
            idle_memory_kb=data.draw(st.integers(0, 8)) * GIB,
            idle_gpus=data.draw(st.integers(0, 2)),
        )
        index.add(changed)
        current[host.id] = changed

    # then it answers like one built from what the hosts are now
    assert list(candidates(index, need, strategy)) == list(candidates(index_of(list(current.values())), need, strategy))
    assert {host.id for host in candidates(index, Resources(0, 0, 0, 0), strategy)} == {
        host.id for host in current.values() if host.idle_cores >= 0
    }


@given(hosts=idle_hosts(), need=needs, strategy=st.sampled_from(STRATEGIES), data=st.data())
def test_the_order_does_not_depend_on_arrival(
    hosts: list[Host], need: Resources, strategy: HostBookingStrategy, data: st.DataObject
) -> None:
    shuffled = data.draw(st.permutations(hosts))

    assert list(candidates(index_of(hosts), need, strategy)) == list(candidates(index_of(shuffled), need, strategy))


@pytest.mark.parametrize("saturation", [True, False])
def test_a_host_of_the_right_bucket_with_too_little_memory_is_left_out(saturation: bool) -> None:
    # given a bucket (2 GiB wide) that holds one host with too little and one with enough
    index = index_of([make_host("little", memory_gib=4.5), make_host("enough", memory_gib=5.5)])

    found = candidates(index, make_need(1, memory_gib=5), HostBookingStrategy(memory_saturation=saturation))

    assert [host.id for host in found] == ["enough"]


def test_work_without_gpus_spares_the_hosts_that_have_them() -> None:
    index = index_of(
        [
            make_host("four-gpus", cores=2, idle_gpus=4, idle_gpu_memory_kb=GIB),
            make_host("one-gpu", cores=2, idle_gpus=1, idle_gpu_memory_kb=GIB),
            make_host("gpu-memory-only", cores=2, idle_gpu_memory_kb=GIB),
            make_host("no-gpu", cores=64),
        ]
    )

    found = [host.id for host in candidates(index, make_need(1), HostBookingStrategy())]

    assert found == ["no-gpu", "gpu-memory-only", "one-gpu", "four-gpus"]


def test_gpu_work_never_looks_at_hosts_without_gpus() -> None:
    # given many hosts without GPUs: the exact check reads a host's memory, so it would read theirs
    class Watched(Host):
        looked_at: int = 0

        def __getattribute__(self, name: str) -> object:
            if name == "idle_gpus":
                Watched.looked_at += 1
            return super().__getattribute__(name)

    plain = [make_host(f"h{number}") for number in range(50)]
    index = index_of([Watched(*(getattr(host, name) for name in Host.__slots__)) for host in plain])
    index.add(make_host("gpu", idle_gpus=2, idle_gpu_memory_kb=8 * GIB))
    Watched.looked_at = 0

    found = [host.id for host in candidates(index, make_need(1, gpus=1), HostBookingStrategy())]

    assert found == ["gpu"]
    assert Watched.looked_at == 0


def test_a_search_walks_no_further_than_it_is_asked_to() -> None:
    index = index_of([make_host(f"h{number}", cores=1 + number % 60) for number in range(1000)])
    found = candidates(index, make_need(30), HostBookingStrategy())

    assert next(found).idle_cores == 30
