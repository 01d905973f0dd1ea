"""A HostCache without threads, time or database, for tests of the planner."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from opencue_sched.domain.farm import Host, Reservation
from opencue_sched.domain.reservation import Need
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.placement.host_groups import Accept, Census, HostGroups
from opencue_sched.placement.policy import Strategy


class FrozenPool(HostCache):
    """A fixed list of hosts for one planner at a time. Not thread-safe."""

    def __init__(
        self, hosts: Iterable[Host], *, memory_key_divisor_kb: int = 2 * 1024 * 1024, instance: str = ""
    ) -> None:
        self.groups = HostGroups(memory_key_divisor_kb=memory_key_divisor_kb, instance=instance)
        self.holds: dict[str, Reservation] = {}
        for host in hosts:
            for tag in host.tags:
                self.groups.open((host.facility_id, tag))
            self.groups.put(host)

    def check_out(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: Strategy,
        accept: Accept,
        *,
        allocs: Collection[str] | None = None,
        score: Callable[[Host], float] | None = None,
        patient: bool = True,
    ) -> Host | None:
        accepted = filter(accept, self.groups.candidates(facility_id, tags, need, strategy, allocs))
        host = next(accepted, None) if score is None else min(accepted, key=score, default=None)
        if host is not None:
            self.groups.hide(host.id)
        return host

    def being_booked(self) -> Collection[str]:
        """None: a pool of one planner at a time, whose own hosts are as good as any."""
        return ()

    def check_in(self, host: Host, taken: Mapping[str, Reservation]) -> bool:
        current = host
        for proc_id, reservation in taken.items():
            self.holds[proc_id] = reservation
            current = current.less(reservation, last_updated=current.last_updated + 1)
        self.groups.put(current)
        return True

    def census(
        self, facility_id: str, tags: Sequence[str], need: Need, allocs: Collection[str] | None = None
    ) -> Census:
        return self.groups.census(facility_id, tags, need, allocs)

    def settle(self, host_id: str, *, committed: Collection[str], lost: Collection[str]) -> None:
        host = self.groups.get(host_id)
        for proc_id in lost:
            hold = self.holds.pop(proc_id, None)
            if hold is not None and host is not None:
                back = Reservation(-hold.cores, -hold.memory_kb, -hold.gpus, -hold.gpu_memory_kb)
                host = host.less(back, last_updated=host.last_updated + 1)
        for proc_id in committed:
            self.holds.pop(proc_id, None)
        if host is not None:
            self.groups.put(host)

    def get(self, host_id: str) -> Host | None:
        """The host as it is now."""
        return self.groups.get(host_id)
