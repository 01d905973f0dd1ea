"""A broker that falls silent in the middle of a publish, for longer than the lease of the waiting beat lives."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule
from kombu import Queue

from opencue_sched.beat import LeaderScheduler
from opencue_sched.coordination.keys import LeaderKeys, QueueName, priority_lists
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.transport import broker_settings, guard_transports
from opencue_sched.store.fences import PersistentFences
from tests.kit.environment import stores_of
from tests.kit.polling import eventually

KEYS = LeaderKeys("cue", "beat")
SWEEPS = QueueName("cue", "sweep")
INTERVAL_SECONDS = 0.2


@pytest.fixture
def taken(redis_server) -> Iterator[list[dict[str, int]]]:
    """The headers of what was sent, oldest first: a worker takes each message as it comes."""
    headers: list[dict[str, int]] = []
    ended = threading.Event()

    def take() -> None:
        with redis.Redis.from_url(redis_server.url, decode_responses=True) as client:
            while not ended.is_set():
                if message := client.brpop(priority_lists(SWEEPS), timeout=0.05):
                    headers.append(json.loads(message[1])["headers"])

    worker = threading.Thread(target=take)
    worker.start()
    yield headers
    ended.set()
    worker.join()


@pytest.fixture
def beat(redis_client, engine, settings) -> Iterator[Callable[[str, float], LeaderScheduler]]:
    """Makes beats with one task, each with its broker and its lease's length in seconds."""
    guard_transports()
    with ExitStack() as stack:
        stack.enter_context(stores_of(settings))

        def make(broker: str, lease_seconds: float) -> LeaderScheduler:
            app = Celery("beat", broker=broker_settings(broker).url, set_as_current=False)
            stack.callback(app.close)
            made = LeaderScheduler(app=app, lazy=True)
            made.gate = LeaderGate(
                redis_client, KEYS, ttl_seconds=lease_seconds, retry_seconds=0, fences=PersistentFences(engine)
            )
            every = schedule(INTERVAL_SECONDS, app=app)
            options = {"queue": Queue(str(SWEEPS)), "declare": []}
            started = datetime(2026, 1, 1, tzinfo=UTC)
            made.data = {"sweep": ScheduleEntry("sweep", "sweep", started, schedule=every, options=options, app=app)}
            return made

        yield make


def test_others_take_over_no_tick_is_fired_twice_and_the_late_message_is_dropped(
    beat, taken, proxy, redis_server, redis_client, engine
):
    parts = urlsplit(redis_server.url)
    silent = beat(parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl(), 2.0)
    eventually(lambda: silent.tick() and taken, what="a tick of the first")
    # when its broker falls silent in the middle of a publish
    proxy.hold("EVALSHA")
    blocked = threading.Thread(target=lambda: eventually(lambda: silent.tick() and proxy.holds.is_set()))
    blocked.start()
    assert proxy.holds.wait(100)
    old = int(redis_client.get(KEYS.fence))
    # then another leads when the lease has run out, and fires
    other = beat(redis_server.url, 100.0)
    eventually(lambda: other.tick() and taken[-1]["fence"] > old, what="a tick of the other")
    assert blocked.is_alive()
    # and what the first one sends when the broker goes on is late, once there, and no tick of the other's
    before = len(taken)
    proxy.let_go()
    blocked.join()
    (late,) = eventually(lambda: [headers for headers in taken[before:] if headers["fence"] == old])
    stale = PersistentFences(engine).leader(KEYS.name).why_stale(late["fence"], late["tick_of"], late["tick"])
    assert stale == "former_leader"
    # and it stands by: neither gone, nor firing
    silent.tick()
    assert silent.gate.fence is None
    seen = len(taken)
    eventually(lambda: other.tick() and silent.tick() and len(taken) > seen + 1, what="more ticks")
    assert {headers["fence"] for headers in taken[seen:]} == {other.gate.fence}
    assert {*Counter(headers["tick"] for headers in taken).values()} == {1}
