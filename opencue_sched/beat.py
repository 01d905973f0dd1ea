"""Redundant beats: run as many ``celery -A opencue_sched beat`` as you like, one fires.

``LeaderScheduler`` is the scheduler class (set in celeryconfig.py, and an entry point). A standby does nothing but
campaign. The leader names each tick by its nominal time by the clock of Redis (coordination/leader.py), records it
under its fence, and only then sends the message. The message carries the fence and the tick, and the worker that takes
it compares them with the record.

Interval schedules fire by tick; other schedules (crontab) when they are due, under the name of that minute. Of the
ticks that were missed while nobody led the latest is fired, and stands for all.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

import structlog
from celery.beat import ScheduleEntry, Scheduler
from celery.schedules import schedule as interval_schedule
from kombu.exceptions import KombuError
from redis.exceptions import RedisError
from sqlalchemy.exc import SQLAlchemyError

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.clients.postgres import make_engine
from opencue_sched.clock import boot_clock
from opencue_sched.coordination.keys import beat_keys, worker_group
from opencue_sched.coordination.leader import ONE_REDIS, LeaderGate, nominal_tick, tick_series
from opencue_sched.coordination.presence import BEAT_TYPE, REFRESH_SECONDS, Presence
from opencue_sched.errors import SchedulerError
from opencue_sched.insight.health import describe_failure
from opencue_sched.settings import Settings, get_settings
from opencue_sched.signals import StopOrder
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker import fleet_metrics
from opencue_sched.worker.fleet_metrics import FleetCensus
from opencue_sched.worker.messenger import EVENTS_TASK
from opencue_sched.worker.metrics import PORTS_TRIED, serve_metrics
from opencue_sched.worker.probes import PULSE

log = structlog.get_logger(__name__)

MINUTE = 60.0
"""The seconds of a minute, by which the ticks of a schedule without an interval are numbered."""
POLL_SECONDS = 0.5
"""The longest wait between two looks at the lease and at what is due. With more, renewals of the lease
and of the presence come later than they should; with less, a leader asks Redis for the time more often."""
LOG_AGAIN_SECONDS = 60.0
"""The time between two log lines of one event about one subject."""
FUTURE_SECONDS = 5.0
"""A recorded tick that begins more than this ahead was fired while the clock of Redis was wrong; less may be the drift
between the two servers of a failover."""


def make_gate(settings: Settings, *, clock: Callable[[], float] = boot_clock) -> LeaderGate:
    """The leader gate of a beat process, with its fence kept in PostgreSQL."""
    coordination = settings.coordination
    return LeaderGate(
        guarded_redis(settings.redis_dsn, settings),
        beat_keys(coordination.namespace, settings.scheduler.facility),
        ttl_seconds=coordination.lease_ttl,
        retry_seconds=coordination.retry_interval,
        quiet_seconds=coordination.lease_ttl if coordination.handover == "conservative" else 0.0,
        fences=PersistentFences(make_engine(settings, application_name="opencue-sched-beat", pool_size=1)),
        clock=clock,
    )


def announce_beat(settings: Settings, gate: LeaderGate) -> Presence:
    """Announce this beat, and return its presence. Its name has some of the leader gate's token in it, because beats of
    one machine have the same instance name."""
    coordination = settings.coordination
    presence = Presence(
        guarded_redis(settings.redis_dsn, settings),
        coordination.namespace,
        types=(BEAT_TYPE,),
        group=worker_group(settings.scheduler.facility, coordination.group),
        instance=f"{settings.instance}-{gate.token[:8]}",
        capabilities=(coordination.handover, gate.keys.role),
    )
    presence.announce()
    return presence


class LeaderScheduler(Scheduler):
    """celery.beat scheduler behind the leader gate. Used by beat's thread; those of metrics and census only read the
    gate's fence."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.gate: LeaderGate | None = None
        self.presence: Presence | None = None
        self.census: FleetCensus | None = None
        self.stop_order: StopOrder | None = None
        """The order to stop this beat; None before the beat has started, and where only the schedule is read."""
        self._serves = False
        """Whether metrics and probes are served."""
        self._refresh_at = 0.0
        """The time of the next refresh of the presence, by the boot clock."""
        self._shown_fence = 0
        """The fence in the presence; 0 while this beat does not lead."""
        self._ahead = 0.0
        """How far the last tick that was recorded too early is ahead, in seconds; 0 for none."""
        self._log_again_at: dict[tuple[str, object], float] = {}
        """The time from which each event may be logged again about each subject, by the boot clock."""
        super().__init__(*args, **kwargs)

    def tick(self, *args: Any, **kwargs: Any) -> float:  # noqa: ARG002 - celery's signature
        """Fire what is due, if this beat leads; returns seconds until it wants to be called again.

        With a stop order the tick waits these seconds itself, since Celery's sleep would not end when the order comes,
        and raises SystemExit when it does, upon which Celery closes this scheduler. A tick under way ends first: with
        stores that do not answer that takes as long as their clients wait (clients.redis_client, celeryconfig).
        """
        PULSE.beat()
        try:
            gate = self._opened()
            leading = gate.renew() is not None
            trouble: Exception | None = gate.trouble
            self._show(gate)
            wait = self._lead(gate) if leading else self._stand_by(gate)
        except (RedisError, SQLAlchemyError, SchedulerError, KombuError) as raised:
            trouble, wait = raised, POLL_SECONDS
        if trouble is not None:
            error = describe_failure(trouble, get_settings())
            self._log_again(log.warning, "beat_cannot_reach_its_stores", type(trouble), error=error)
        if self.stop_order is None:
            return wait
        if self.stop_order.wait(wait):
            raise SystemExit
        return 0.0

    def _lead(self, gate: LeaderGate) -> float:
        """Fire what is due; returns seconds until the next look."""
        now, last_ticks, self._ahead = gate.redis_time(), gate.last_ticks, 0.0
        wanted = [(name, entry) for name, entry in list(self.schedule.items()) if self._is_wanted(entry)]
        waits = [self._serve(gate, name, entry, now, last_ticks) for name, entry in wanted]
        fleet_metrics.ticks_ahead.set(self._ahead)
        return max(0.01, min([*waits, POLL_SECONDS]))

    def _is_wanted(self, entry: ScheduleEntry) -> bool:
        """Whether a task may have anything to do: that of events has not while none is written."""
        return entry.task != EVENTS_TASK or self.census is None or self.census.events_are_written

    def _stand_by(self, gate: LeaderGate) -> float:
        """Fire nothing; returns seconds until the next look."""
        if gate.led_elsewhere:
            of = {"namespace": gate.keys.ns, "role": gate.keys.role}
            self._log_again(log.error, "two_redis_under_one_database", cure=ONE_REDIS, **of)
        fleet_metrics.ticks_ahead.set(0)
        return max(0.05, min(gate.next_look, POLL_SECONDS))

    def _opened(self) -> LeaderGate:
        """The leader gate, made at the first call with what goes with it. Raises SchedulerError."""
        if self.gate is None:
            self.serve()
            settings = get_settings()
            self.gate = gate = make_gate(settings)
            fleet_metrics.watch_gate(gate)
            self.census = FleetCensus(settings, lambda: gate.fence is not None)
            self.census.thread.start()
            log.info("beat_started", role=gate.keys.role)
        return self.gate

    def serve(self) -> None:
        """Serve metrics and probes, from the first call on. Raises SchedulerError."""
        if not self._serves:
            queue = get_settings().queue
            port = queue.metrics_port
            serve_metrics(queue.metrics_host, port + PORTS_TRIED if port else 0, fleet_metrics.BEAT)
            self._serves = True

    def _show(self, gate: LeaderGate) -> None:
        """Refresh the presence every few seconds, and at once when this beat begins or ceases to lead."""
        now, fence = boot_clock(), gate.fence or 0
        if now < self._refresh_at and fence == self._shown_fence:
            return
        if self.census is not None and fence and fence != self._shown_fence:
            self.census.thread.wake()
        self._refresh_at, self._shown_fence = now + REFRESH_SECONDS, fence
        if self.presence is None:
            self.presence = announce_beat(get_settings(), gate)
        self.presence.refresh(fence=fence)

    def _log_again(self, log_it: Callable[..., object], event: str, of: object = None, **fields: object) -> None:
        """Log an event, at most once in LOG_AGAIN_SECONDS about each subject ``of``."""
        if boot_clock() >= self._log_again_at.get((event, of), 0.0):
            self._log_again_at[event, of] = boot_clock() + LOG_AGAIN_SECONDS
            log_it(event, **fields)

    def _serve(
        self, gate: LeaderGate, name: str, entry: ScheduleEntry, now: float, last_ticks: Mapping[str, int]
    ) -> float:
        """Fire what is due of one entry; returns seconds until it is due again."""
        schedule = entry.schedule
        run_every = schedule.run_every if type(schedule) is interval_schedule else None  # type: ignore[attr-defined]
        interval = run_every.total_seconds() if run_every is not None else MINUTE
        series = name if run_every is None else tick_series(name, interval)
        last = last_ticks.get(series, 0)
        if run_every is None:
            tick, wait = self._tick_at_due_time(entry, now, last)
        else:
            tick = nominal_tick(now, interval)
            wait = (tick + 1) * interval - now
        if tick > last:
            self._fire(gate, series, entry, tick, now)
        elif (ahead := last * interval - now) > FUTURE_SECONDS:  # fired while the clock of Redis ran ahead
            self._ahead = max(self._ahead, ahead)
            what = {"task": series, "seconds_to_wait": round(ahead, 1)}
            self._log_again(log.error, "tick_of_the_future_recorded", series, **what)
        return wait

    def _tick_at_due_time(self, entry: ScheduleEntry, now: float, last: int) -> tuple[int, float]:
        """The tick that is due by a schedule without an interval, 0 for none, and the seconds until the next is."""
        at = datetime.fromtimestamp(now, UTC)
        entry.schedule.nowfun = lambda: at  # type: ignore[union-attr]
        # What was never fired counts from the start of this beat, by the clock of its host, which may be ahead.
        entry.last_run_at = since = min(entry.last_run_at or at, at)
        since = max(since, datetime.fromtimestamp(last * MINUTE, UTC))
        due, wait = entry.schedule.is_due(since)  # type: ignore[union-attr]
        return int(now // MINUTE) if due else 0, float(wait)

    def _fire(self, gate: LeaderGate, series: str, entry: ScheduleEntry, tick: int, now: float) -> None:
        """Claim a tick and send its message, unless another leader has the tick or this beat leads no more."""
        fence = gate.fence
        producer = self.producer  # connects at its first use: not between a tick's claim and its message
        if fence is None or not gate.may_fire(series, tick):
            return
        headers = {"tick": tick, "tick_of": series, "fence": fence, "sent_at": now}
        options = entry.options or {}
        fired = copy.copy(entry)
        fired.options = {**options, "headers": {**options.get("headers", {}), **headers}}
        self.apply_entry(fired, producer=producer)
        log.debug("tick_fired", task=series, tick=tick)

    def close(self) -> None:
        """Hand over at a clean stop, so that a standby leads within its retry interval."""
        if self.gate is not None:
            self.gate.resign()
        if self.presence is not None:
            self.presence.withdraw()
        if self.census is not None:
            self.census.close()
        super().close()
