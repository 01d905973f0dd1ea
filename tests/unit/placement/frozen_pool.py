"""A HostCache without threads, time or database, for tests of the planner."""

from __future__ import annotations

from collections.abc import Iterable

from opencue_sched.domain.hosts import Host
from opencue_sched.placement.host_cache import HostCache
from opencue_sched.settings import HostCacheSettings


class FrozenPool(HostCache):
    """A fixed list of hosts for one planner at a time, read once."""

    def __init__(self, hosts: Iterable[Host]) -> None:
        listed = list(hosts)
        super().__init__(
            HostCacheSettings(),
            lambda facility_id, *_: [host for host in listed if host.facility_id == facility_id],
            clock=lambda: 0.0,
        )
        for facility_id in {host.facility_id for host in listed}:
            self.refresh(facility_id, {tag for host in listed for tag in host.tags})

    def get(self, host_id: str) -> Host | None:
        """The host as it is now."""
        return self._shown.get(host_id)
