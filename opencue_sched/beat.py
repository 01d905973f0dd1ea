"""Redundant beats: run as many ``celery -A opencue_sched beat`` as you like, one fires.

``LeaderScheduler`` is the scheduler class (set in celeryconfig.py, and an entry point). A standby does nothing but
campaign. The leader names each tick by its nominal time, checks its fence and marks the tick as fired in one Lua call,
and only then sends the message. Interval schedules fire by tick; other schedules (crontab) by their own due time,
rounded to the minute.
"""

from __future__ import annotations

import time
from typing import Any

import structlog
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedule as interval_schedule
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.connection import make_redis
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.names import LeaderKeys
from opencue_sched.coordination.ticks import CatchUp, due_ticks, seconds_to_next
from opencue_sched.settings import Settings, get_settings
from opencue_sched.store.engine import make_engine
from opencue_sched.store.fences import PersistentFences

log = structlog.get_logger(__name__)

CONSERVATIVE_SECONDS = 180.0
MARK_SECONDS_AT_LEAST = 600.0
POLL_SECONDS = 0.5


def beat_role(settings: Settings) -> str:
    """The elected role of the beats of one facility scope."""
    return f"beat.{settings.scheduler.facility}" if settings.scheduler.facility else "beat"


def make_gate(settings: Settings) -> LeaderGate:
    """The leader gate of a beat process, with its fence kept in PostgreSQL."""
    coordination = settings.coordination
    conservative = coordination.handover == "conservative"
    return LeaderGate(
        make_redis(settings.redis_dsn, settings),
        LeaderKeys(coordination.namespace, beat_role(settings)),
        ttl_seconds=CONSERVATIVE_SECONDS if conservative else coordination.lease_ttl,
        renew_deadline_seconds=CONSERVATIVE_SECONDS * 0.9 if conservative else coordination.renew_deadline,
        retry_seconds=coordination.retry_interval,
        fences=PersistentFences(make_engine(settings, application_name="opencue-sched-beat", pool_size=1)),
    )


class LeaderScheduler(Scheduler):
    """celery.beat scheduler behind the leader gate."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.gate: LeaderGate | None = None
        super().__init__(*args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:  # noqa: ARG002 - celery's signature
        """Fire what is due, if this beat leads; returns seconds until it wants to be called again."""
        if self.gate is None:
            self.gate = make_gate(get_settings())
        try:
            if self.gate.renew() is None:
                return POLL_SECONDS
            now = self._store_time()
            waits = [self._serve(name, entry, now) for name, entry in list(self.schedule.items())]
        except (RedisError, SQLAlchemyError) as error:
            log.warning("beat_cannot_reach_its_stores", error=str(error))
            return POLL_SECONDS
        return max(0.01, min([*waits, POLL_SECONDS]))

    def _store_time(self) -> float:
        assert self.gate is not None  # noqa: S101 - set by tick
        seconds, micros = self.gate._client.time()
        return float(seconds) + float(micros) / 1e6

    def _serve(self, name: str, entry: ScheduleEntry, now: float) -> float:
        assert self.gate is not None  # noqa: S101 - set by tick
        if type(entry.schedule) is interval_schedule:
            interval = float(entry.schedule.run_every.total_seconds())  # type: ignore[attr-defined]
            policy = CatchUp((entry.options or {}).get("headers", {}).get("catch_up", CatchUp.LATEST))
            for tick in due_ticks(self.gate.last_tick(name), now, interval, policy):
                self._fire(name, entry, tick, mark_seconds=max(MARK_SECONDS_AT_LEAST, 3 * interval))
            return seconds_to_next(now, interval)
        due, wait = entry.is_due()
        if due:
            self._fire(name, entry, int(time.time() // 60), mark_seconds=MARK_SECONDS_AT_LEAST)
            self.schedule[name] = next(entry)
        return float(wait)

    def _fire(self, name: str, entry: ScheduleEntry, tick: int, *, mark_seconds: float) -> None:
        assert self.gate is not None  # noqa: S101 - set by tick
        if self.gate.may_fire(name, tick, mark_seconds=mark_seconds):
            self.apply_entry(entry, producer=self.producer)
            log.debug("tick_fired", task=name, tick=tick)

    def close(self) -> None:
        """Hand over at a clean stop, so that a standby leads within its retry interval."""
        if self.gate is not None:
            self.gate.resign()
        super().close()
