"""A broker that falls silent in the middle of a publish, for longer than the lease of the waiting beat lives."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from celery.beat import ScheduleEntry
from celery.schedules import schedule
from kombu import Queue
from sqlalchemy import Engine

from opencue_sched.beat import LeaderScheduler
from opencue_sched.coordination import transport
from opencue_sched.coordination.keys import LeaderKeys, QueueName, priority_lists
from opencue_sched.coordination.leader import LeaderGate
from opencue_sched.coordination.transport import broker_settings, guard_transports
from opencue_sched.store.fences import PersistentFences
from tests.kit.polling import eventually

KEYS = LeaderKeys("cue", "beat")
SWEEPS = QueueName("cue", "sweep")
INTERVAL_SECONDS = 0.2


class Beat(LeaderScheduler):
    """With one task, and a lease of its own length; looked at by its test."""

    def __init__(self, client: redis.Redis, engine: Engine, broker: str, lease_seconds: float) -> None:
        self.app = Celery("beat", broker=broker_settings(broker).url, set_as_current=False)
        self.Producer = self.app.amqp.Producer
        self.presence = None
        self._log_again_at: dict[tuple[str, object], float] = {}
        self.gate = LeaderGate(
            client,
            KEYS,
            ttl_seconds=lease_seconds,
            retry_seconds=0,
            fences=PersistentFences(engine),
        )
        every = schedule(INTERVAL_SECONDS, app=self.app)
        options = {"queue": Queue(str(SWEEPS)), "declare": []}
        started = datetime(2026, 1, 1, tzinfo=UTC)
        self.data = {"sweep": ScheduleEntry("sweep", "sweep", started, schedule=every, options=options, app=self.app)}

    def _show(self, gate: LeaderGate) -> None:
        """It has no presence."""


def fired(client: redis.Redis) -> list[dict[str, int]]:
    """The headers of what was sent, oldest first."""
    lists = [client.lrange(name, 0, -1) for name in priority_lists(SWEEPS)]
    return [json.loads(text)["headers"] for texts in lists for text in reversed(texts)]


@pytest.fixture
def beat(redis_client, engine) -> Iterator[Callable[[str, float], Beat]]:
    """Makes beats, each with its broker and its lease's length in seconds."""
    guard_transports()
    made: list[Beat] = []

    def make(broker: str, lease_seconds: float) -> Beat:
        made.append(Beat(redis_client, engine, broker, lease_seconds))
        return made[-1]

    yield make
    for one in made:
        one.app.close()


def test_others_take_over_no_tick_is_fired_twice_and_the_late_message_is_dropped(
    beat, proxy, redis_server, redis_client, monkeypatch, engine
):
    # As if a worker took each message before the next one is sent: none takes the place of another.
    tick_of = transport.replacing_tick
    monkeypatch.setattr(transport, "replacing_tick", lambda message: (str(tick_of(message)), 1))
    parts = urlsplit(redis_server.url)
    silent = beat(parts._replace(netloc=parts.netloc.replace(f":{parts.port}", f":{proxy.port}")).geturl(), 2.0)
    eventually(lambda: silent.tick() and fired(redis_client), what="a tick of the first")
    # when its broker falls silent in the middle of a publish
    proxy.hold("EVALSHA")
    blocked = threading.Thread(target=lambda: eventually(lambda: silent.tick() and proxy.holds.is_set()))
    blocked.start()
    assert proxy.holds.wait(100)
    old = int(redis_client.get(KEYS.fence))
    # then another leads when the lease has run out, and fires
    other = beat(redis_server.url, 100.0)
    eventually(lambda: other.tick() and fired(redis_client)[-1]["fence"] > old, what="a tick of the other")
    assert blocked.is_alive()
    # and what the first one sends when the broker goes on is late, once there, and no tick of the other's
    before = len(fired(redis_client))
    proxy.let_go()
    blocked.join()
    late = fired(redis_client)[before]
    assert late["fence"] == old
    stale = PersistentFences(engine).leader(KEYS.name).why_stale(late["fence"], late["tick_of"], late["tick"])
    assert stale == "former_leader"
    # and it stands by: neither gone, nor firing
    silent.tick()
    assert silent.gate.fence is None
    seen = len(fired(redis_client))
    eventually(lambda: other.tick() and silent.tick() and len(fired(redis_client)) > seen + 1, what="more ticks")
    assert {headers["fence"] for headers in fired(redis_client)[seen:]} == {other.gate.fence}
    assert {*Counter(headers["tick"] for headers in fired(redis_client)).values()} == {1}
