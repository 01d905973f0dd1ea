"""Leadership: one process acts, the others stand by.

A lease in Redis with a token of the process and a fence that only grows. The holder renews it; one that could not
renew for the renewal deadline - counted from *before* the call that last succeeded, on a clock that runs through a
suspend - stops by itself, before the lease can have gone to somebody else. Losing the lease demotes to standby, and the
process campaigns again; it never exits.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import redis
import structlog
from redis.exceptions import RedisError

from opencue_sched.coordination.names import LeaderKeys
from opencue_sched.lua_scripts import call_script

log = structlog.get_logger(__name__)


def boot_clock() -> float:
    """Seconds since boot, suspend included where the system can say so."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class FenceStore(Protocol):
    """Where the highest fence survives an emptied Redis (PostgreSQL)."""

    def highest(self, role: str) -> int: ...

    def raise_to(self, role: str, fence: int) -> None: ...


@dataclass(frozen=True, slots=True)
class Lease:
    """Proof of leadership at the moment of the last renewal."""

    token: str
    fence: int


class LeaderGate:
    """This process's candidacy for one role.

    ``renew()`` is cheap to call often: it talks to Redis only every third of the lease. ``lease`` is None when this
    process may not act.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: LeaderKeys,
        *,
        ttl_seconds: float,
        renew_deadline_seconds: float,
        retry_seconds: float,
        fences: FenceStore | None = None,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._client = client
        self.keys = keys
        self._ttl = ttl_seconds
        self._deadline = renew_deadline_seconds
        self._retry = retry_seconds
        self._fences = fences
        self._clock = clock
        self.token = uuid.uuid4().hex
        self._fence: int | None = None
        self._confirmed = float("-inf")
        self._next_try = float("-inf")

    @property
    def lease(self) -> Lease | None:
        """The lease, unless it was lost or could not be renewed in time."""
        if self._fence is None:
            return None
        if self._clock() - self._confirmed >= self._deadline:
            log.warning("leadership_expired", role=self.keys.role, fence=self._fence)
            self._demote()
            return None
        return Lease(self.token, self._fence)

    def renew(self) -> Lease | None:
        """Campaign or renew if it is time to, and return the lease. Redis errors count as not renewed."""
        now = self._clock()
        if now >= self._next_try:
            leading = self._fence is not None
            try:
                self._campaign(now)
            except RedisError as error:
                log.warning("lease_renewal_failed", role=self.keys.role, error=str(error))
                self._next_try = now + self._retry
            else:
                self._next_try = now + (self._ttl / 3 if self._fence is not None else self._retry)
            if leading and self._fence is None:
                log.warning("leadership_lost", role=self.keys.role)
        return self.lease

    def _campaign(self, now: float) -> None:
        floor = self._fences.highest(self.keys.role) if self._fences is not None and self._fence is None else 0
        taken, fence, _ = call_script(
            self._client,
            "lease_acquire",
            [self.keys.lease, self.keys.fence],
            [self.token, int(self._ttl * 1000), floor],
        )
        if not taken:
            self._demote()
            return
        if self._fence != fence:
            if self._fences is not None:
                self._fences.raise_to(self.keys.role, int(fence))
            log.info("leadership_taken", role=self.keys.role, fence=fence)
        self._fence = int(fence)
        self._confirmed = now

    def resign(self) -> None:
        """Hand over: release the lease so that a standby takes over at its next try. Safe when not leading."""
        self._fence = None
        try:
            if call_script(self._client, "lease_release", [self.keys.lease], [self.token]):
                log.info("leadership_resigned", role=self.keys.role)
        except RedisError as error:
            log.warning("lease_release_failed", role=self.keys.role, error=str(error))

    def may_fire(self, task: str, tick: int, *, mark_seconds: float) -> bool:
        """True exactly once per (task, tick) in the whole fleet, and only while leading.

        Checks the fence and sets the mark in one Lua call, before anything is sent.
        """
        lease = self.lease
        if lease is None:
            return False
        answer = call_script(
            self._client,
            "fire_tick",
            [self.keys.lease, self.keys.fired(task, tick), self.keys.last_ticks],
            [lease.token, lease.fence, int(mark_seconds * 1000), task, tick],
        )
        if answer[0] == 1:
            return True
        if answer[1] == "not_leader":
            log.warning("fenced_off", role=self.keys.role, task=task, tick=tick, fence=lease.fence)
            self._demote()
        return False

    def last_tick(self, task: str) -> int | None:
        """The nominal tick of ``task`` fired last, by any leader."""
        value = self._client.hget(self.keys.last_ticks, task)
        return None if value is None else int(str(value))

    def _demote(self) -> None:
        self._fence = None
