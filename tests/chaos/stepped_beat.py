"""Beats that die at a chosen command: a script that forks a leader, has it killed, and forks its successor.

Every step n is a leader of its own (in a namespace of its own) that kills itself with SIGKILL right after the n-th
command by which it changes anything in Redis, or records a tick, was carried out, and before it could do anything more.
Dying before the next command, or before an answer arrives, leaves nothing else behind; and commands that only read
leave nothing.
How many things come before some of them depends on the time, so these deaths have steps of their own: NAMED.

    python stepped_beat.py LAST_STEP PARALLEL     one line of JSON a step
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from collections import Counter
from datetime import timedelta
from typing import Any

import redis
from celery.beat import ScheduleEntry
from redis.connection import AbstractConnection

from opencue_sched import beat
from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.celery import app
from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.clients.postgres import make_engine
from opencue_sched.coordination.keys import LeaderKeys, QueueName, beat_keys, priority_lists
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.settings import get_settings
from opencue_sched.store.fences import PersistentFences
from tests.chaos.wire import SCRIPTS, Unwatched, commands_of

# What a beat would load as it starts: once, before the forks, not after each. None of it looks at the settings.
for name in (
    "celery.app.amqp",
    "celery.events",
    "celery.loaders.app",
    "opencue_sched.coordination.routing",
    "opencue_sched.coordination.leader",
    "opencue_sched.worker.task",
    "psycopg2.extras",
    "sqlalchemy.dialects.postgresql.psycopg2",
):
    importlib.import_module(name)

INTERVAL_SECONDS = 0.4
TASKS = ("one", "other")
DEADLINE_SECONDS = 30.0
READS = {
    "HELLO",
    "AUTH",
    "CLIENT",
    "SELECT",
    "INFO",
    "GET",
    "MGET",
    "TIME",
    "HGETALL",
    "PING",
    "EXISTS",
    "SMEMBERS",
    "LLEN",
    "ZRANGE",
}
NAMED = {-1: ("lease_acquire", 2), -2: ("lease_drop", 1), -3: ("presence_drop", 1)}
"""Step: die after this change was made that many times. The second lease_acquire is the renewal."""


CLAIMED = "claimed:"
"""What comes before a tick that was recorded, in the lines of a leader."""


def namespace(step: int) -> str:
    return f"step{step}"


def taken(ns: str) -> str:
    """Key of the list of messages that a worker has taken."""
    return f"{ns}:taken"


class Commands:
    """Sees what this process sends to Redis, tells ``out`` of each change, and dies after the n-th of them."""

    def __init__(self, out: int, die_after: int | None) -> None:
        self.out, self.die_after, self.changes = out, die_after, 0
        self.made: Counter[str] = Counter()
        send = AbstractConnection.send_packed_command

        def watched(connection: AbstractConnection, packed: object, *args: object, **rest: object) -> None:
            send(connection, packed, *args, **rest)
            names = [name for name, _ in commands_of(packed) if name not in READS]
            if names:
                self.changed(names, connection)

        AbstractConnection.send_packed_command = watched

    def changed(self, names: list[str], connection: AbstractConnection | None) -> None:
        self.changes += 1
        self.made.update(names)
        os.write(self.out, f"{'+'.join(names)}\n".encode())
        name, times = NAMED.get(self.die_after or 0, ("", 0))
        if self.changes == self.die_after or (name in names and self.made[name] == times):
            while connection is not None and not connection.can_read(timeout=10):
                pass
            os.kill(os.getpid(), signal.SIGKILL)


class WatchedFences(PersistentFences):
    """Tells ``commands`` of each tick that was recorded."""

    commands: Commands

    def claim_tick(self, name: str, fence: int, task: str, tick: int) -> tuple[bool, int]:
        answer = super().claim_tick(name, fence, task, tick)
        if answer[0]:
            os.write(self.commands.out, f"{CLAIMED}{task}:{tick}\n".encode())
            self.commands.changed(["claim_tick"], None)
        return answer


class Worker:
    """Takes every message off the queue of sweeps, and keeps it on a list of its own: the oldest is the last there."""

    def __init__(self, ns: str) -> None:
        pool = redis.ConnectionPool.from_url(get_settings().redis_dsn, connection_class=Unwatched)
        self.client, self.ns = redis.Redis(connection_pool=pool), ns

    def take_all(self) -> None:
        for waiting in priority_lists(QueueName(self.ns, "sweep")):
            while self.client.lmove(waiting, taken(self.ns), "RIGHT", "LEFT"):
                pass


class CountingScheduler(beat.LeaderScheduler):
    """Knows what it sent itself; whoever led before it left its own ticks.

    A worker takes each message before the next is sent, so that none takes the place of another.
    """

    def __init__(self, *args: Any, worker: Worker, **kwargs: Any) -> None:
        self.worker, self.fired = worker, Counter[str]()
        super().__init__(*args, **kwargs)

    def apply_entry(self, entry: ScheduleEntry, producer: Any = None) -> None:
        self.worker.take_all()
        super().apply_entry(entry, producer=producer)
        self.fired[str(entry.name)] += 1

    def fired_each(self, times: int) -> bool:
        return all(self.fired[name] >= times for name in TASKS)


def watched_gate(commands: Commands) -> LeaderGate:
    """The leader gate of a beat. One that makes its own has a census beside it, a thread which would make changes
    between those that are counted here."""
    settings = get_settings()
    fences = WatchedFences(make_engine(settings, application_name="opencue-sched-beat", pool_size=1))
    fences.commands = commands
    return LeaderGate(
        guarded_redis(settings.redis_dsn, settings),
        beat_keys(settings.coordination.namespace, settings.scheduler.facility),
        ttl_seconds=settings.coordination.lease_ttl,
        retry_seconds=settings.coordination.retry_interval,
        fences=fences,
    )


def live(step: int, out: int, die_after: int | None) -> None:
    """A beat, from its start to its clean end, once it fired every task twice and renewed its lease."""
    os.environ["OPENCUE_SCHED_COORDINATION__NAMESPACE"] = namespace(step)
    get_settings.cache_clear()
    app.conf.beat_schedule = {
        name: {"task": "opencue_sched.sweep.sweep_clusters", "schedule": timedelta(seconds=INTERVAL_SECONDS)}
        for name in TASKS
    }
    if die_after == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    commands = Commands(out, die_after)
    scheduler = CountingScheduler(app=app, worker=Worker(namespace(step)))
    scheduler.gate = watched_gate(commands)
    deadline = time.monotonic() + DEADLINE_SECONDS
    while time.monotonic() < deadline and not (scheduler.fired_each(2) and commands.made["lease_acquire"] >= 2):
        wait = scheduler.tick()
        time.sleep(min(wait, 0.1))
    scheduler.close()


def forked(step: int, die_after: int | None) -> tuple[list[str], list[str], int]:
    """Run a beat as a process of its own; what it changed, the ticks it recorded, and its exit status."""
    readable, writable = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(readable)
        code = 1
        try:
            live(step, writable, die_after)
            code = 0
        finally:
            os._exit(code)
    os.close(writable)
    with os.fdopen(readable, encoding="utf-8") as lines:
        told = lines.read().split()
    _, status = os.waitpid(pid, 0)
    claims = [line.removeprefix(CLAIMED) for line in told if line.startswith(CLAIMED)]
    return [line for line in told if not line.startswith(CLAIMED)], claims, os.waitstatus_to_exitcode(status)


def run(step: int, client: redis.Redis) -> dict[str, object]:
    """A leader that dies after its ``step``-th change, then its successor."""
    keys = LeaderKeys(namespace(step), "beat")
    changes, claimed, status = forked(step, step)
    lease, fence = client.pttl(keys.lease), int(client.get(keys.fence) or 0)
    _, then_claimed, end = forked(step, None)
    return {
        "step": step,
        "changes": changes,
        "claimed": claimed + then_claimed,
        "status": status,
        "lease": lease,
        "fence": fence,
        "end": end,
    }


def main(last: int, parallel: int) -> None:
    url = os.environ["OPENCUE_SCHED_REDIS_URL"]
    with redis.Redis.from_url(url) as client:
        for name in SCRIPTS.values():
            client.script_load(load_script(name).text)
    runners = []
    for first in range(parallel):
        pid = os.fork()
        if pid == 0:
            with redis.Redis.from_url(url, decode_responses=True) as client:
                for step in range(min(NAMED) + first, last + 1, parallel):
                    line = json.dumps(run(step, client))
                    os.write(1, f"{line}\n".encode())
            os._exit(0)
        runners.append(pid)
    sys.exit(max(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in runners))


if __name__ == "__main__":
    import structlog

    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    main(int(sys.argv[1]), int(sys.argv[2]))
