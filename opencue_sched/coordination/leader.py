"""Leadership: one process acts, the others stand by.

A lease in Redis with a token of the process and a fence that only grows. A holder that could not renew it for two
thirds of its life - counted from *before* the call that last succeeded, on a clock that runs through a suspend - stops
by itself, before the lease can have gone to another. It stands by then and campaigns again; it never exits.

PostgreSQL keeps the record (store/fences.py), because Redis may be emptied or go on from an older state: a fence that
Redis granted counts once the record has it, a tick once its row is written. A leader that dies between two of these
steps leaves a fence or a tick unused; neither is ever given out twice. The record also names the leader's Redis: beats
of one database and two Redis would depose each other for ever, so one of them stands by.

Each fired tick renews the lease. With ``quiet_seconds`` (the conservative hand-over) a new leader fires nothing
until that long after the last fire of the one before, which is in the record.
"""

from __future__ import annotations

import hashlib
import math
import random
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import cast

import redis
import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.clients.lua_scripts import call_script
from opencue_sched.clock import boot_clock
from opencue_sched.coordination.keys import LeaderKeys
from opencue_sched.store.fences import LeaderRecord, PersistentFences

# A tick is the number of whole intervals since the epoch, by Redis TIME, so every beat gives the same name to the same
# moment whatever its own clock says.


def tick_series(task: str, interval_seconds: float) -> str:
    """The name under which the ticks of ``task`` are counted and remembered.

    With another interval the same number means another moment: after a change from 1 s to 2 s, the last tick of before
    would lie decades ahead, and the task would never fire again.
    """
    return f"{task}@{interval_seconds:.10g}"


def nominal_tick(now_seconds: float, interval_seconds: float) -> int:
    """The tick that ``now`` belongs to."""
    tick = int(now_seconds // interval_seconds)
    # 8.0 // 1.6 is 4.0, for 1.6 is stored as a little more; but 5 * 1.6 == 8.0: there the next tick has begun.
    return tick + 1 if (tick + 1) * interval_seconds <= now_seconds else tick


log = structlog.get_logger(__name__)

LONGEST_LEASE_SECONDS = 180.0
"""The longest lease of any leader: the conservative hand-over's default, unless this one's own is longer."""
ONE_REDIS = "set OPENCUE_SCHED_REDIS_URL to one Redis for every beat and worker of this database and namespace"
"""The remedy where leaders of two Redis servers are found."""


class LeaderGate:
    """The candidacy of this process for one role.

    ``renew()`` is cheap to call often: it talks to the stores every third of the lease while it leads, else every
    ``retry_seconds`` at most. ``fence`` is None when this process may not act.

    One thread campaigns, renews and resigns. Any thread may read ``fence``.
    """

    def __init__(
        self,
        client: redis.Redis,
        keys: LeaderKeys,
        *,
        ttl_seconds: float,
        retry_seconds: float,
        fences: PersistentFences,
        quiet_seconds: float = 0.0,
        clock: Callable[[], float] = boot_clock,
    ) -> None:
        self._client = client
        self.keys = keys
        self._ttl = ttl_seconds
        self._retry = retry_seconds
        self._quiet = quiet_seconds
        self._fences = fences
        self._clock = clock
        self.token = uuid.uuid4().hex
        self._fence: int | None = None
        self._last_fence = 0
        self._has_lease = False
        # Times by ``clock``: the last renewal that succeeded began, the next call of the stores is due, a conservative
        # hand-over ends.
        self._confirmed = self._next_try = self._quiet_until = -math.inf
        self.last_ticks: dict[str, int] = {}
        """The last tick of every task that any leader fired, by task. Read at the election: since then only this leader
        fires."""
        self._fired_at = -math.inf
        """The time at which any beat last fired a tick, as this process knows."""
        self._last_fired: int | None = None
        """The last tick fired that the record named."""
        self._elsewhere: tuple[float, float] | None = None
        """The times at which the record of a leader of another Redis was first and last found fresh, one look after the
        other; None when the last look found none."""
        self.trouble: RedisError | SQLAlchemyError | None = None
        """Why the last campaign or renewal got no answer of a store; None when it had all it asked for."""

    @property
    def tick_age(self) -> float:
        """Seconds since any beat fired a tick, as this process knows; infinite if it knows of none. By its own clock,
        whatever happens to a store's; a beat that hangs sees it grow."""
        return max(0.0, self._clock() - self._fired_at)

    @property
    def led_elsewhere(self) -> bool:
        """Whether a leader of another Redis renews, while this process stands by for it."""
        # A dead leader's record stays fresh for one lease: one found fresh over a longer time was renewed.
        return self._elsewhere is not None and self._elsewhere[1] - self._elsewhere[0] > self._ttl

    @property
    def next_look(self) -> float:
        """Seconds until renew() talks to the stores again."""
        return max(0.0, self._next_try - self._clock())

    @property
    def fence(self) -> int | None:
        """The fence under which this process leads; None when the lease was lost or could not be renewed in time."""
        fence = self._fence  # read once: the thread that serves the metrics looks here as well
        if fence is None:
            return None
        if self._clock() - self._confirmed >= self._ttl * 2 / 3:  # well before another takes over
            log.warning("leadership_expired", role=self.keys.role, fence=fence)
            self._fence = None
            return None
        return fence

    def renew(self) -> int | None:
        """Campaign or renew if it is time to, and return ``fence``. An error of a store is kept in ``trouble``.

        Nobody is elected without PostgreSQL, and a leader that it does not answer stops like one that Redis does not
        answer: another may reach it.
        """
        now = self._clock()
        if now >= self._next_try:
            # Up to a quarter less than the retry interval, so that standbys do not campaign in step.
            self._next_try = now + self._retry * (1.0 - 0.25 * random.random())
            leading, self.trouble = self._fence is not None, None
            try:
                self._campaign(now)
            except (RedisError, SQLAlchemyError) as error:
                self.trouble = error
                log.debug("lease_renewal_failed", role=self.keys.role, error=str(error))
                if self._fence is None and self._has_lease and isinstance(error, SQLAlchemyError):
                    self._leave_lease()  # to a beat that PostgreSQL answers
            if self._fence is None:
                if leading:
                    log.warning("leadership_lost", role=self.keys.role)
            elif self._confirmed == now:
                self._next_try = now + self._ttl / 3
        return self.fence

    def _campaign(self, now: float) -> None:
        """Renew the leadership, or try to be elected. Raises RedisError and SQLAlchemyError."""
        held, name = self.fence, self.keys.name
        if held is not None:
            # PostgreSQL first, because Redis may have forgotten a leader that was elected after this one.
            highest = self._fences.renew(name, held, store=self._store())
            if highest <= held and self._ask("renew", held):
                self._confirmed = now
                return
        # From here on a former holder is a candidate like any other: another may have led since, or Redis was emptied.
        self._fence = None
        record = self._fences.leader(name)
        if record.fired is not None and record.fired != self._last_fired:
            self._last_fired, self._fired_at = record.fired, now - max(0.0, record.fired_age_seconds)
        if self._stands_by_for_another_redis(now, record):
            return
        fence = self._ask("take", record.fence)
        if not fence:
            return
        if not self._fences.claim(name, fence):
            log.warning("fence_not_recorded", role=self.keys.role, fence=fence)
            self._leave_lease()
            return
        self._fences.renew(name, fence, store=self._store())
        # Read after the claim: until then the leader before may still fire.
        recorded = self._fences.leader(name)
        self.last_ticks = dict(recorded.ticks)
        if self._quiet and record.fence not in (0, self._last_fence):
            # Counted from now, and not from the beginning of this campaign, because the age in the answer is as of now.
            # The whole time if it is unknown when the leader before fired last.
            since = max(0.0, recorded.fired_age_seconds) if recorded.fired else 0.0
            self._quiet_until = self._clock() + self._quiet - since
        log.info("leadership_taken", role=self.keys.role, fence=fence)
        self._confirmed = now  # before _fence: the metrics' thread, reading both, would end an unconfirmed leadership
        self._fence = self._last_fence = fence

    def _stands_by_for_another_redis(self, now: float, record: LeaderRecord) -> bool:
        """Whether a leader of another Redis recorded itself within the life of a lease. After a failover of Redis that
        is the former leader's last record; if it is renewed all the same, two Redis are in use (``led_elsewhere``)."""
        # A beat does not wait for its own record, which after a failover names the Redis of before.
        fresh = record.store is not None and 0 <= record.age_seconds < self._ttl
        if not fresh or record.fence == self._last_fence or record.store == self._store():
            self._elsewhere = None
            return False
        self._elsewhere = (now if self._elsewhere is None else self._elsewhere[0], now)
        return True

    def _store(self) -> int:
        """A number for the Redis process and database that this client uses now. Emptying Redis does not change it."""
        run_id = cast("dict[str, object]", self._client.info("server"))["run_id"]
        database = self._client.connection_pool.connection_kwargs.get("db") or 0
        return int(hashlib.sha256(f"{run_id}/{database}".encode()).hexdigest()[:15], 16)

    def _ask(self, what: str, fence: int) -> int:
        """Take or renew (``what``) the lease in Redis; returns the fence it is held under, 0 when it is not."""
        longest = max(LONGEST_LEASE_SECONDS, self._ttl)
        arguments: list[str | int] = [self.token, int(self._ttl * 1000), what, fence, int(longest * 1000)]
        held = int(call_script(self._client, "lease_acquire", [self.keys.lease, self.keys.fence], arguments))
        self._has_lease = held > 0
        return held

    def _leave_lease(self) -> bool:
        """Give up the lease in Redis; returns whether this process had it."""
        self._has_lease = False
        return _drop(self._client, self.keys.lease, self.token)

    def resign(self) -> None:
        """Hand over: release the lease so that a standby takes over at its next try. Safe when not leading."""
        self._fence = None
        if self._leave_lease():
            log.info("leadership_resigned", role=self.keys.role)

    def may_fire(self, task: str, tick: int) -> bool:
        """True at most once per (task, tick) in the whole fleet, and only while leading. Raises RedisError, and
        SQLAlchemyError: then the tick may count as fired, and was not.
        """
        fence, now = self.fence, self._clock()
        if fence is None or now < self._quiet_until:
            return False
        # Redis first: a lease that is gone already uses up no tick. Then the record, which alone decides: it has every
        # leader that was elected since, and every tick that was fired.
        held = self._ask("renew", fence)
        claimed, latest = self._fences.claim_tick(self.keys.name, fence, task, tick) if held else (False, 0)
        if latest != fence:
            log.warning("fenced_off", role=self.keys.role, task=task, tick=tick, fence=fence)
            self._fence, self._next_try = None, now
            return False
        self._confirmed = now
        self.last_ticks[task] = max(self.last_ticks.get(task, tick), tick)
        if claimed:
            self._fired_at = now
        return claimed

    def redis_time(self) -> float:
        """Seconds since the epoch by the clock of Redis, which names the ticks."""
        seconds, micros = self._client.time()
        return float(seconds) + float(micros) / 1e6


@contextmanager
def exclusive(client: redis.Redis, key: str, *, seconds: float) -> Iterator[bool]:
    """Hold the lease ``key`` during the block, at most ``seconds``; yields whether it is held. Raises RedisError.

    The lease only spares doubled work, and has no fence: a caller that takes longer than ``seconds`` goes on beside the
    next one, so correctness must not depend on it.
    """
    token = uuid.uuid4().hex
    mine = bool(call_script(client, "lease_take", [key], [token, round(1000 * seconds)]))
    try:
        yield mine
    finally:
        if mine:
            _drop(client, key, token)


def _drop(client: redis.Redis, key: str, token: str) -> bool:
    """Give up a lease of this process; returns whether it had it. After an error the lease ends by itself."""
    try:
        return bool(call_script(client, "lease_drop", [key], [token]))
    except RedisError as error:
        log.warning("lease_left_to_expire", lease=key, error=str(error))
        return False
