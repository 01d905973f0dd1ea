"""Leadership: one process acts, the others stand by.

A lease in Redis with a token of the process and a fence that only grows. The holder renews it; one that could not
renew for the renewal deadline - counted from *before* the call that last succeeded, on a clock that runs through a
suspend - stops by itself, before the lease can have gone to somebody else. Losing the lease demotes to standby, and the
process campaigns again; it never exits.

Redis may forget: be emptied, or go on from an older state. So fences and ticks are given out by a fence store as well
(PostgreSQL), each at most once. A leader dies between what it does in one store and in the other: then a fence is left
out, or a tick is lost, but neither is given twice.

Beats of two Redis under one database and name would succeed each other without end, each by the lease of its own. So a
leader notes its Redis in the fence store at each renewal, and a beat of another one stands by while it does.

With ``quiet_seconds`` (the conservative hand-over) the lease's life also restarts at each fire, and a new leader fires
nothing until that long after the last fire of the one before, by the clock of Redis.
"""

from __future__ import annotations

import hashlib
import random
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol, cast

import redis
import structlog
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.coordination.names import LeaderKeys, turn_key
from opencue_sched.domain.cluster import LeaderNote
from opencue_sched.lua_scripts import call_script

# Nominal ticks of periodic tasks, and what to do with those missed while nobody led.
#
# A tick is the number of whole intervals since the epoch, by Redis TIME, so every beat gives the same name to the same
# moment whatever its own clock says.

MINUTE = 60.0
CATCH_UP_WINDOW_TICKS = 100
MARK_SPARE_SECONDS = 600.0
"""By so much clocks may differ, and no tick is taken for one that was not fired."""


class CatchUp(StrEnum):
    """What a new leader does with the ticks it finds unfired."""

    SKIP = "skip"
    LATEST = "latest"
    ALL = "all"


def tick_series(task: str, interval_seconds: float) -> str:
    """The name under which the ticks of ``task`` are counted and remembered.

    With another interval the same number means another moment: after a change from 1 s to 2 s, the last tick of before
    would lie decades ahead, and the task would never fire again.
    """
    return f"{task}@{interval_seconds:.10g}"


def tick_began(series: str, tick: int) -> float:
    """When a tick of this series began, seconds since the epoch; those of schedules without interval are minutes."""
    _, _, interval = series.rpartition("@")
    try:
        return tick * float(interval)
    except ValueError:
        return tick * MINUTE


def last_began(ticks: Mapping[str, int], now_seconds: float) -> float | None:
    """When the latest of these ticks began, those that are still to come left out; None when there is none."""
    began = [tick_began(series, tick) for series, tick in ticks.items()]
    return max((moment for moment in began if moment <= now_seconds), default=None)


def nominal_tick(now_seconds: float, interval_seconds: float) -> int:
    """The tick that ``now`` belongs to."""
    return int(now_seconds // interval_seconds)


def due_ticks(last: int | None, now_seconds: float, interval_seconds: float, policy: CatchUp) -> list[int]:
    """The ticks to fire now, oldest first.

    ``last`` is the tick fired last by anybody. A task that never fired fires at once, and SKIP differs from LATEST
    only after a gap: LATEST fires the newest tick at once, SKIP waits for the next one to begin.
    """
    current = nominal_tick(now_seconds, interval_seconds)
    if last is None:
        return [current]
    if current <= last:
        return []
    if current == last + 1:
        return [current]
    if policy is CatchUp.SKIP:
        into_tick = now_seconds - current * interval_seconds
        return [current] if into_tick < min(interval_seconds, 1.0) else []
    if policy is CatchUp.LATEST:
        return [current]
    return list(range(max(last + 1, current - CATCH_UP_WINDOW_TICKS + 1), current + 1))


def mark_seconds(interval_seconds: float, policy: CatchUp) -> float:
    """How long a tick is remembered as fired: for longer than it may be found due."""
    window = CATCH_UP_WINDOW_TICKS if policy is CatchUp.ALL else 1
    return MARK_SPARE_SECONDS + window * interval_seconds


def seconds_to_next(now_seconds: float, interval_seconds: float) -> float:
    """Seconds until the next tick begins."""
    return (nominal_tick(now_seconds, interval_seconds) + 1) * interval_seconds - now_seconds


# By which clock ticks are named: Redis's, unless PostgreSQL's contradicts it.
#
# Neither is to be trusted alone. A tick that is named by a clock that runs ahead is recorded as fired, for good: when
# the clock is put right its task waits until the time gets there. One that is named by a clock that was put back comes
# before what was fired already, and its task waits as well.

AGREE_SECONDS = 5.0
"""Clocks this close are taken for the same: the rest is their drift, and the way of an answer on a slow machine."""


@dataclass(frozen=True, slots=True)
class Clocks:
    """One moment by both clocks, seconds since the epoch. ``postgresql`` is None where nothing is recorded there."""

    redis: float
    postgresql: float | None = None

    @property
    def apart(self) -> float:
        """How far Redis is ahead of PostgreSQL, in seconds; below 0 when it is behind."""
        return 0.0 if self.postgresql is None else self.redis - self.postgresql

    @property
    def agree(self) -> bool:
        return abs(self.apart) <= AGREE_SECONDS

    def now(self, last_fired: float | None) -> float:
        """The time for a task whose last tick began at ``last_fired``.

        Of two clocks that disagree the earlier: nothing is named that is still to come by either. Unless that one is
        behind what was fired already, for then it is the one that is wrong. As long as one of the two is right, this is
        never ahead of it by more than AGREE_SECONDS; nor behind the last tick by more than twice that, for that one may
        have been named by a clock that was ahead, and this is said by one that is behind, both as far as they may be.
        """
        if self.postgresql is None or self.agree:
            return self.redis
        earlier, later = sorted((self.redis, self.postgresql))
        return later if last_fired is not None and earlier < last_fired - AGREE_SECONDS else earlier


log = structlog.get_logger(__name__)

SLOW_ANSWER_SECONDS = 1.0
LONGEST_LEASE_SECONDS = 180.0
"""Of any leader, unless this one's own is longer: that of the conservative hand-over by default."""
ONE_REDIS = "set OPENCUE_SCHED_REDIS_URL to one Redis for every beat and worker of this database and namespace"
_BEYOND_ANY_TICK = 2**63


def boot_clock() -> float:
    """Seconds since boot, suspend included where the system can say so."""
    clock = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)
    return time.clock_gettime(clock)


class FenceStore(Protocol):
    """Where fences survive a Redis that was emptied or failed over to an older state (PostgreSQL).

    What Redis grants is a candidate's only once ``claim`` has said so: it does for no fence twice. So is a tick with
    ``claim_tick``, which says so to the latest leader only, and also how high the highest fence is.
    """

    def highest(self, name: str) -> int: ...

    def claim(self, name: str, fence: int) -> bool: ...

    def claim_tick(self, name: str, fence: int, task: str, tick: int) -> tuple[bool, int]: ...

    def last_ticks(self, name: str) -> dict[str, int]: ...

    def time(self) -> float: ...

    def note_leader(self, name: str, fence: int, *, store: int, process: int) -> None: ...

    def leader(self, name: str) -> LeaderNote | None: ...

    def note_other_redis(self, name: str) -> None: ...

    def two_redis(self, name: str) -> bool: ...


@dataclass(frozen=True, slots=True)
class Lease:
    """Proof of leadership at the moment of the last renewal."""

    token: str
    fence: int


@dataclass(frozen=True, slots=True)
class _Question:
    """May this tick, claimed under this fence, be fired? Asked again it has the same nonce."""

    fence: int
    tick: int
    nonce: str


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
        quiet_seconds: float = 0.0,
        fences: FenceStore | None = None,
        clock: Callable[[], float] = boot_clock,
        jitter: Callable[[], float] = random.random,
    ) -> None:
        self._client = client
        self.keys = keys
        self._ttl = ttl_seconds
        self._deadline = renew_deadline_seconds
        self._retry = retry_seconds
        self._quiet_ms = int(quiet_seconds * 1000)
        self._fences = fences
        self._clock = clock
        self._jitter = jitter
        self.token = uuid.uuid4().hex
        self._fence: int | None = None
        self._confirmed = float("-inf")
        self._next_try = float("-inf")
        self._fired: float | None = None
        self._fired_at = -1
        self._unanswered: dict[str, _Question] = {}
        self._last: dict[str, int] = {}
        self._second_clock: float | None = None
        self._unrecorded_since: float | None = None
        self._elsewhere: LeaderNote | None = None
        self.led_elsewhere = False
        """Whether a leader of another Redis was seen to renew while this process stood by for it."""
        self.trouble: RedisError | SQLAlchemyError | None = None
        """Why the last campaign or renewal got no answer of a store; None when it had all it asked for."""

    @property
    def tick_age(self) -> float:
        """Seconds since anybody in the fleet fired a tick, as this process knows; infinite if it knows of none.

        Grows when this process stops looking, so it also shows a beat that hangs; and by this process's own clock, so
        whatever happens to that of Redis. Where Redis was emptied, the record of the fence store says it.
        """
        return float("inf") if self._fired is None else max(0.0, self._clock() - self._fired)

    @property
    def lease(self) -> Lease | None:
        """The lease, unless it was lost or could not be renewed in time."""
        fence = self._fence  # read once: who serves the metrics looks here as well
        if fence is None:
            return None
        if self._clock() - self._confirmed >= self._deadline:
            log.warning("leadership_expired", role=self.keys.role, fence=fence)
            self._demote()
            return None
        return Lease(self.token, fence)

    def renew(self) -> Lease | None:
        """Campaign or renew if it is time to, and return the lease. Redis errors count as not renewed; ``trouble``
        has them, for a caller to tell of.

        Errors of the fence store come through to a candidate, for it cannot lead without. A holder renews without,
        until it could record no tick that was due for the renewal deadline.
        """
        now = self._clock()
        if now >= self._next_try:
            self._next_try = now + self._retry_seconds()
            leading = self._fence is not None
            self.trouble = None
            try:
                self._campaign(now)
            except RedisError as error:
                self.trouble = error
                log.debug("lease_renewal_failed", role=self.keys.role, error=str(error))
            except SQLAlchemyError as error:
                self.trouble = error
                raise
            if self._fence is None:
                if leading:
                    log.warning("leadership_lost", role=self.keys.role)
            elif self._confirmed == now:
                self._next_try = now + self._ttl / 3
        return self.lease

    @property
    def next_look(self) -> float:
        """Seconds until renew() talks to Redis again."""
        return max(0.0, self._next_try - self._clock())

    def _retry_seconds(self) -> float:
        """Up to a quarter less than the retry interval, so that standbys do not campaign in step."""
        return self._retry * (1.0 - 0.25 * self._jitter())

    def _campaign(self, now: float) -> None:
        lease = self.lease
        if lease is not None and self._still_highest(lease.fence) and self._ask(now, "renew", lease.fence) is not None:
            self._confirmed = now
            return
        # A lease that is gone may have been another's in between, or the store lost everything: as any candidate.
        self._demote()
        if self._fences is not None and self._stands_by_for_another_redis(self._fences):
            return
        floor = self._fences.highest(self.keys.name) if self._fences is not None else 0
        fence = self._ask(now, "take", floor)
        if self._fired is None and self._fences is not None:
            age = recorded_tick_age(self._fences, self.keys)
            self._fired = None if age is None else now - age
        if fence is not None and self._recorded(fence):
            log.info("leadership_taken", role=self.keys.role, fence=fence)
            self._confirmed = now
            self._fence = fence

    def _stands_by_for_another_redis(self, fences: FenceStore) -> bool:
        """Whether a leader of another Redis noted itself within the life of a lease. After a failover that is the last
        sign of a leader of before; one that goes on renewing says that two Redis are in use at the same time."""
        noted, before = fences.leader(self.keys.name), self._elsewhere
        self._elsewhere = None
        if noted is not None and 0 <= noted.age_seconds < self._ttl and noted.process != self._process:
            self._elsewhere = noted if noted.store != self._store() else None
        if self._elsewhere is None:
            self.led_elsewhere = False
        elif before is not None and before.store == self._elsewhere.store and before.seen != self._elsewhere.seen:
            self.led_elsewhere = True
        if self.led_elsewhere:
            fences.note_other_redis(self.keys.name)
        return self._elsewhere is not None

    def _store(self) -> int:
        """A number of the Redis process and the database in it that this client uses now. An emptied one keeps it."""
        run_id = cast("dict[str, object]", self._client.info("server"))["run_id"]
        database = self._client.connection_pool.connection_kwargs.get("db") or 0
        return int(hashlib.sha256(f"{run_id}/{database}".encode()).hexdigest()[:15], 16)

    @property
    def _process(self) -> int:
        return int(self.token[:15], 16)

    def _still_highest(self, fence: int) -> bool:
        """Whether nobody was elected since, as far as can be known: Redis may have forgotten it."""
        if self._fences is None:
            return True
        try:
            highest = self._fences.highest(self.keys.name)
            self._hear_second_clock(self._fences)
            self._fences.note_leader(self.keys.name, fence, store=self._store(), process=self._process)
            return highest <= fence
        except SQLAlchemyError as error:
            self.trouble = error
            log.debug("fence_store_away", role=self.keys.role, fence=fence, error=str(error))
            return True

    def _ask(self, now: float, what: str, fence: int) -> int | None:
        """The fence under which this process holds the lease in Redis, if it does."""
        longest = max(LONGEST_LEASE_SECONDS, self._ttl)
        taken, held, _, fired_ms_ago, fired_at = call_script(
            self._client,
            "lease_acquire",
            [self.keys.lease, self.keys.fence, self.keys.fired_at, self.keys.quiet],
            [self.token, int(self._ttl * 1000), what, fence, self._quiet_ms, int(longest * 1000)],
        )
        if fired_at >= 0 and fired_at != self._fired_at:
            self._fired, self._fired_at = now - fired_ms_ago / 1000, fired_at
        return int(held) if taken else None

    def _recorded(self, fence: int) -> bool:
        """Whether ``fence`` is this process's for good. If not, the lease is left to others."""
        mine = False
        try:
            if self._fences is None:
                mine = True
            elif self._fences.claim(self.keys.name, fence):
                self._last = self._fences.last_ticks(self.keys.name)
                self._hear_second_clock(self._fences)
                self._fences.note_leader(self.keys.name, fence, store=self._store(), process=self._process)
                mine = True
            else:
                log.warning("fence_not_recorded", role=self.keys.role, fence=fence)
        finally:
            if not mine:
                self._release()
        return mine

    def resign(self) -> None:
        """Hand over: release the lease so that a standby takes over at its next try. Safe when not leading."""
        self._demote()
        if self._release():
            log.info("leadership_resigned", role=self.keys.role)

    def _release(self) -> bool:
        try:
            return bool(call_script(self._client, "lease_release", [self.keys.lease], [self.token]))
        except RedisError as error:
            log.warning("lease_release_failed", role=self.keys.role, error=str(error))
            return False

    def may_fire(self, task: str, tick: int, *, mark_seconds: float) -> bool:
        """True at most once per (task, tick) in the whole fleet, and only while leading.

        Claims the tick in the fence store, for Redis may forget; then checks the fence and sets the mark in one Lua
        call, before anything is sent. When that raises RedisError nothing is known; asked again under the same lease,
        it gives the answer that was lost. A look at the lease comes before all that, so that one that is gone already
        uses up no tick.
        """
        lease = self.lease
        if lease is None:
            return False
        now = self._clock()
        keys = self.keys
        held, quiet = cast("list[str | None]", self._client.mget(keys.lease, keys.quiet))
        if held != f"{lease.token}|{lease.fence}":
            self._fenced_off(lease.fence, task, tick)
            return False
        if quiet is not None:
            return False
        question = self._claimed(lease.fence, task, tick)
        if question is None:
            return False
        answer = call_script(
            self._client,
            "fire_tick",
            [keys.lease, keys.fired(task, tick), keys.last_ticks, keys.fired_at, keys.quiet],
            [lease.token, lease.fence, int(mark_seconds * 1000), task, tick, self._quiet_ms, question.nonce],
        )
        del self._unanswered[task]
        if answer[0] == 1:
            self._fired = now
            self._last[task] = max(self._last.get(task, tick), tick)
            if self._quiet_ms:
                self._confirmed = now
            return True
        if answer[1] == "not_leader":
            self._fenced_off(lease.fence, task, tick)
        return False

    def _claimed(self, fence: int, task: str, tick: int) -> _Question | None:
        """The question for a tick that nobody claimed before; the one that got no answer yet, if it is the same."""
        asked = self._unanswered.pop(task, None)
        if asked is None or (asked.fence, asked.tick) != (fence, tick):
            asked = _Question(fence, tick, uuid.uuid4().hex)
            if self._fences is not None:
                claimed, highest = self._claim_tick(self._fences, fence, task, tick)
                if highest != fence:
                    self._fenced_off(fence, task, tick)
                    return None
                if not claimed:
                    self._last[task] = max(self._last.get(task, tick), tick)
                    return None
        self._unanswered[task] = asked
        return asked

    def _claim_tick(self, fences: FenceStore, fence: int, task: str, tick: int) -> tuple[bool, int]:
        """As the fence store does. Who got no answer of it for the renewal deadline leaves the lease to the others:
        they may reach it, and this one fires nothing."""
        try:
            answer = fences.claim_tick(self.keys.name, fence, task, tick)
        except SQLAlchemyError:
            now = self._clock()
            self._unrecorded_since = now if self._unrecorded_since is None else self._unrecorded_since
            if now - self._unrecorded_since >= self._deadline:
                log.error("leader_cannot_record_ticks", role=self.keys.role, fence=fence)
                self._unrecorded_since = None
                self.resign()
                self._next_try = now + self._retry
            raise
        self._unrecorded_since = None
        return answer

    def _fenced_off(self, fence: int, task: str, tick: int) -> None:
        """Somebody else was elected, or the lease was lost: stand by, and look at once."""
        log.warning("fenced_off", role=self.keys.role, task=task, tick=tick, fence=fence)
        self._demote()
        self._next_try = self._clock()

    def redis_time(self) -> float:
        """Seconds since the epoch by the clock of Redis."""
        seconds, micros = self._client.time()
        return float(seconds) + float(micros) / 1e6

    def clocks(self) -> Clocks:
        """What time it is by both stores, the same for every beat. That of the fence store is heard at each renewal,
        and goes on by this process's own clock."""
        by_redis = self.redis_time()
        return Clocks(by_redis, None if self._second_clock is None else self._second_clock + self._clock())

    def _hear_second_clock(self, fences: FenceStore) -> None:
        """Remember what this process's clock lacks to that of the fence store. An answer that took long says little."""
        asked = self._clock()
        told = fences.time()
        answered = self._clock()
        if self._second_clock is None or answered - asked < SLOW_ANSWER_SECONDS:
            self._second_clock = told - (asked + answered) / 2

    def last_ticks(self) -> dict[str, int]:
        """The nominal tick fired last of every task, by any leader, as Redis and the fence store know.

        Without those that this leader asked for and got no answer: they may be marked, but nobody fired them. And
        without what is no tick, which somebody else wrote there: it is as if Redis had forgotten, until the next one.
        """
        found = {str(task): _tick(str(text)) for task, text in self._client.hgetall(self.keys.last_ticks).items()}
        last = {task: tick for task, tick in found.items() if tick is not None}
        for task, tick in self._last.items():
            last[task] = max(last.get(task, tick), tick)
        for task, asked in self._unanswered.items():
            if asked.fence == self._fence:
                last[task] = min(last.get(task, asked.tick), asked.tick - 1)
        return last

    def _demote(self) -> None:
        self._fence = None


def _tick(text: str) -> int | None:
    """None for what is no number, or one that no fence store could keep."""
    try:
        tick = int(text)
    except ValueError:
        return None
    return tick if abs(tick) < _BEYOND_ANY_TICK else None


def recorded_tick_age(fences: FenceStore, keys: LeaderKeys) -> float | None:
    """Seconds since the last tick that anybody recorded began, by the fence store and its clock; None for none."""
    now = fences.time()
    began = last_began(fences.last_ticks(keys.name), now)
    return None if began is None else now - began


# What a periodic message is worth: its leader may have been paused between its check and its message.


class Freshness(StrEnum):
    """What a periodic message is worth when it is acted on."""

    CURRENT = "current"
    FORMER_LEADER = "former_leader"
    OVERTAKEN = "overtaken"


def tick_freshness(
    client: redis.Redis,
    keys: LeaderKeys,
    fence: int,
    task: str | None = None,
    tick: int = 0,
    *,
    fences: FenceStore | None = None,
) -> Freshness:
    """Whether a message was sent by the latest leader, and no later tick of the same task has been fired since.

    Not by age: the sender's clock and the receiver's may differ by more than the interval. A Redis that was emptied
    knows of no leader: then the fence store is asked. Raises RedisError, and SQLAlchemyError of that.
    """
    with client.pipeline(transaction=False) as pipe:
        pipe.get(keys.fence)
        pipe.hget(keys.last_ticks, task or "")
        highest, last = pipe.execute()
    if highest is None and fences is not None:
        highest = fences.highest(keys.name)
        last = fences.last_ticks(keys.name).get(task or "")
    if highest is not None and int(highest) > fence:
        return Freshness.FORMER_LEADER
    if task is not None and last is not None and int(last) > tick:
        return Freshness.OVERTAKEN
    return Freshness.CURRENT


# Work that one process of the fleet does at a time.
#
# A turn ends by itself, should its process die, and is given back as soon as it is done. It spares doing the same side
# by side; correctness must not depend on it, for one that outlives its turn goes on beside the next.


@contextmanager
def turn(client: redis.Redis, namespace: str, work: str, *, seconds: float) -> Iterator[bool]:
    """Whether it is this caller's turn, for as long as the block takes and at most ``seconds``. Raises RedisError if
    that cannot be asked."""
    keys, token = [turn_key(namespace, work)], uuid.uuid4().hex
    mine = bool(call_script(client, "turn_take", keys, [token, round(1000 * seconds)]))
    try:
        yield mine
    finally:
        if mine:
            _give_back(client, work, keys, token)


def _give_back(client: redis.Redis, work: str, keys: list[str], token: str) -> None:
    """The work is done: that its turn could not be given back is no failure of it."""
    try:
        call_script(client, "token_drop", keys, [token])
    except RedisError as error:
        log.warning("turn_not_given_back", work=work, error=str(error))
