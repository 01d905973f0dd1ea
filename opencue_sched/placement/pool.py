"""Where the planner gets hosts from: the protocol, and a pool over a plain list."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from opencue_sched.domain.farm import Host, Reservation
from opencue_sched.domain.reservation import Need
from opencue_sched.placement.groups import HostGroups, Survey
from opencue_sched.placement.strategy import Strategy

Accept = Callable[[Host], bool]


@dataclass(frozen=True, slots=True)
class Preference:
    """A choice among hosts that a strategy's order cannot express: the lowest ``score`` of the first ``candidates``."""

    score: Callable[[Host], float]
    candidates: int


class HostPool(Protocol):
    """Hosts that are handed out to one planner at a time.

    A planner checks a host out, cuts reservations from it and checks it in with what it took. From then on everybody
    sees the host without those, although nothing is booked yet: that is a *hold*. ``settle`` ends the holds once the
    outcome of the booking is known.
    """

    def check_out(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: Strategy,
        accept: Accept,
        *,
        allocs: Collection[str] | None = None,
        preference: Preference | None = None,
        patient: bool = True,
    ) -> Host | None:
        """The first host with one of ``tags`` and ``need`` idle that ``accept`` agrees to, or None.

        ``allocs`` leaves out the hosts of other allocations without looking at them. ``accept`` must be pure: it may
        be asked about hosts that are then not handed out. Not ``patient``: the caller has others to look at when there
        is none at the moment.
        """

    def being_booked(self) -> Collection[str]:
        """Ids of the hosts from which plans that are not settled yet took something, the caller's own among them."""

    def check_in(self, host: Host, taken: Mapping[str, Reservation]) -> bool:
        """Give back a host as it was handed out, with what was taken from it by proc id.

        False if the check-out was no longer valid (timed out or invalidated); the holds count all the same.
        """

    def survey(
        self, facility_id: str, tags: Sequence[str], need: Need, allocs: Collection[str] | None = None
    ) -> Survey:
        """What there is for a need that found no host."""

    def settle(self, host_id: str, *, committed: Collection[str], lost: Collection[str]) -> None:
        """End holds by proc id: ``committed`` stay taken until a read shows them, what ``lost`` took is idle again."""


class FrozenPool:
    """A pool over a fixed list of hosts, for tests and for asking what a pass would do. Not thread-safe."""

    def __init__(
        self, hosts: Iterable[Host], *, memory_key_divisor_kb: int = 2 * 1024 * 1024, instance: str = ""
    ) -> None:
        self._groups = HostGroups(memory_key_divisor_kb=memory_key_divisor_kb, instance=instance)
        self._holds: dict[str, Reservation] = {}
        for host in hosts:
            for tag in host.tags:
                self._groups.open((host.facility_id, tag))
            self._groups.put(host)

    def check_out(
        self,
        facility_id: str,
        tags: Sequence[str],
        need: Need,
        strategy: Strategy,
        accept: Accept,
        *,
        allocs: Collection[str] | None = None,
        preference: Preference | None = None,
        patient: bool = True,  # noqa: ARG002 - nobody else has hosts
    ) -> Host | None:
        accepted: list[Host] = []
        for host in self._groups.candidates(facility_id, tags, need, strategy, allocs):
            if accept(host):
                accepted.append(host)
                if preference is None or len(accepted) == preference.candidates:
                    break
        if not accepted:
            return None
        host = accepted[0] if preference is None else min(accepted, key=preference.score)
        self._groups.hide(host.id)
        return host

    def being_booked(self) -> Collection[str]:
        """None: a pool of one planner at a time, whose own hosts are as good as any."""
        return ()

    def check_in(self, host: Host, taken: Mapping[str, Reservation]) -> bool:
        current = host
        for proc_id, reservation in taken.items():
            self._holds[proc_id] = reservation
            current = current.less(reservation, last_updated=current.last_updated + 1)
        self._groups.put(current)
        return True

    def survey(
        self, facility_id: str, tags: Sequence[str], need: Need, allocs: Collection[str] | None = None
    ) -> Survey:
        return self._groups.survey(facility_id, tags, need, allocs)

    def settle(self, host_id: str, *, committed: Collection[str], lost: Collection[str]) -> None:
        host = self._groups.get(host_id)
        for proc_id in lost:
            hold = self._holds.pop(proc_id, None)
            if hold is not None and host is not None:
                back = Reservation(-hold.cores, -hold.memory_kb, -hold.gpus, -hold.gpu_memory_kb)
                host = host.less(back, last_updated=host.last_updated + 1)
        for proc_id in committed:
            self._holds.pop(proc_id, None)
        if host is not None:
            self._groups.put(host)

    def get(self, host_id: str) -> Host | None:
        """The host as it is now."""
        return self._groups.get(host_id)
