"""Which hosts an instance tries first, so that two instances rarely plan the same ones.

By rendezvous hashing over the live instances: no agreement is needed, and an instance that comes or goes moves only its
own share. A share is a preference, never a right: a layer that finds nothing in it looks at every host.
"""

from __future__ import annotations

from collections.abc import Callable

from opencue_sched.coordination.routing import rendezvous


class HostShares:
    """The share of ``instance``. ``live`` names the live instances; it is asked once a pass."""

    def __init__(self, instance: str, live: Callable[[], frozenset[str]]) -> None:
        self._instance = instance
        self._live = live
        self._peers: frozenset[str] = frozenset()
        self._mine: dict[str, bool] = {}

    def first(self) -> Callable[[str], bool] | None:
        """Whether a host (by id) is to be tried first; None for an instance that is alone, or not known as live."""
        peers = self._live()
        if self._instance not in peers or len(peers) < 2:
            return None
        if peers != self._peers:
            self._peers, self._mine = peers, {}
        names, mine = sorted(peers), self._mine

        def is_mine(host_id: str) -> bool:
            known = mine.get(host_id)
            if known is None:
                known = mine[host_id] = rendezvous(host_id, names) == self._instance
            return known

        return is_mine
