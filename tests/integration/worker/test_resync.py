"""After PostgreSQL was away every worker has missed the same: one makes up for it. A cap that failed is tried again."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import redis
from celery import Celery
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

from opencue_sched.accounting import keys
from opencue_sched.coordination.names import resync_counts
from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import LayerSpec
from opencue_sched.settings import Accounting, Settings
from opencue_sched.worker import events as events_module
from opencue_sched.worker import metrics
from opencue_sched.worker.events import Resync
from opencue_sched.worker.runtime import Runtime
from tests.listening import eventually_listen
from tests.polling import eventually

RECENT = 20.0
WORKERS = 6

Make = Callable[..., Resync]


class Looks:
    """Counts the looks of a fleet; those of which the number is in ``bad`` fail."""

    def __init__(self, *bad: int) -> None:
        self._bad = bad
        self._lock = threading.Lock()
        self.begun = self.at_once = self.most_at_once = 0
        self.go = threading.Event()
        self.go.set()

    def __call__(self) -> None:
        with self._lock:
            self.begun += 1
            number = self.begun
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            assert self.go.wait(RECENT)
            if number in self._bad:
                raise OperationalError("SELECT", {}, Exception("the database system is starting up"))
        finally:
            with self._lock:
                self.at_once -= 1


@pytest.fixture
def make(redis_client: redis.Redis) -> Iterator[Make]:
    with ExitStack() as stack:

        def made(look: Callable[[], object]) -> Resync:
            missed = Resync(redis_client, resync_counts("cue"), read_all=look)
            missed.start()
            stack.callback(missed.stop)
            return missed

        yield made


def idle(fleet: list[Resync]) -> bool:
    return not any(it.busy for it in fleet)


def test_one_of_a_fleet_looks_for_all_that_came_back_before_it_began(make: Make, redis_client: redis.Redis):
    looks = Looks()
    fleet = [make(looks) for _ in range(WORKERS)]
    # given that all come back while the first look is held up
    looks.go.clear()
    for worker in fleet:
        worker.everything()
    eventually(lambda: looks.begun == 1, RECENT, "a look")
    looks.go.set()
    eventually(lambda: idle(fleet), RECENT, "an end of it")
    # then those that were late for it share another
    assert looks.begun <= 2
    assert looks.most_at_once == 1
    assert not redis_client.exists(resync_counts("cue") + ":lock")


def test_who_comes_back_later_is_looked_for_anew(make: Make):
    looks = Looks()
    first, second = make(looks), make(looks)
    for number, worker in enumerate((first, second, first), start=1):
        worker.everything()
        eventually(lambda: idle([first, second]), RECENT, "an end of it")
        assert looks.begun == number


def test_a_look_that_fails_is_made_again_soon(make: Make):
    looks = Looks(1, 2)
    worker = make(looks)
    with capture_logs() as said:
        worker.everything()
        eventually(lambda: idle([worker]), RECENT, "a look")
    assert looks.begun == 3
    assert [line["event"] for line in said] == ["resync_left_for_later"], "the same error is told once"


def test_a_worker_looks_itself_though_redis_forgot_how_many_looks_there_were(make: Make, redis_client: redis.Redis):
    looks = Looks()
    worker = make(looks)
    redis_client.hset(resync_counts("cue"), mapping={"begun": 1000, "ended": 1000})
    worker.everything()
    eventually(lambda: idle([worker]), RECENT, "a look")
    redis_client.flushdb()
    worker.everything()
    eventually(lambda: idle([worker]), RECENT, "a look")
    assert looks.begun == 2


# The whole of it, in workers


@pytest.fixture
def fleet(settings: Settings, engine: Engine) -> Iterator[list[Runtime]]:
    """Three workers that listen, over a farm with a job that runs."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.run(farm.job([LayerSpec(frames=3)]).frames, farm.host(cores=64))
    with ExitStack() as stack:
        made = []
        for name in ("one", "two", "three"):
            app = Celery("missed", broker="memory://", set_as_current=False)
            stack.callback(app.close)
            accounting = Accounting(commit_deadline=0.025)
            worker = Runtime(settings.model_copy(update={"instance": name, "accounting": accounting}), app)
            stack.callback(worker.close)
            worker.bootstrap()
            worker.events.start()
            made.append(worker)
            eventually_listen(engine, len(made))
        yield made


def burst(client: redis.Redis) -> str:
    (subscription,) = client.scan_iter(match=keys.subscription("*", "*"))
    return str(client.hget(subscription, "burst"))


def test_after_a_restart_of_postgresql_one_worker_recomputes(
    fleet: list[Runtime], engine: Engine, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch
):
    reports: list[object] = []
    monkeypatch.setattr(metrics, "record_recompute", reports.append)
    # when all connections are lost, and with them what was said then
    with engine.begin() as connection:
        connection.execute(
            text(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                "AND application_name = 'opencue-sched-listener'"
            )
        )
        gone = connection.execute(
            text("DELETE FROM proc WHERE pk_proc = (SELECT min(pk_proc) FROM proc) RETURNING pk_proc")
        ).scalar_one()
        connection.execute(text("UPDATE subscription SET int_burst = 300"))
    # then it is made up for, not by each of them
    eventually(lambda: not redis_client.hexists(keys.LEDGER, gone), RECENT, "the release nobody heard")
    eventually(lambda: burst(redis_client) == "3", RECENT, "the cap nobody heard")
    eventually(lambda: idle([worker.events._resync for worker in fleet]), RECENT, "rest")
    assert len(reports) in (1, 2)


@pytest.mark.parametrize("failing", ["load_caps", "shows_under"])
def test_a_cap_that_changes_while_postgresql_fails_is_read_with_everything_a_moment_later(
    fleet: list[Runtime], engine: Engine, redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch, failing: str
):
    tried: list[int] = []

    def fails(*_: object, **__: object) -> object:
        tried.append(1)
        raise OperationalError("SELECT", {}, Exception("terminating connection"))

    looks: list[object] = []
    woken: list[str] = []
    for worker in fleet:
        monkeypatch.setattr(worker.events.waker, "_sweep", lambda shows, _: woken.extend(shows) or 0.0)
    monkeypatch.setattr(metrics, "record_recompute", looks.append)
    monkeypatch.setattr(events_module, failing, fails)
    with engine.begin() as connection:
        show = connection.execute(text("SELECT pk_show FROM proc LIMIT 1")).scalar_one()
        connection.execute(text("UPDATE subscription SET int_burst = 300"))
        connection.execute(text("UPDATE folder_resource SET int_max_cores = 700"))
    eventually(lambda: len(tried) >= len(fleet), RECENT, "a try of each")
    eventually(lambda: burst(redis_client) == "3", RECENT, "the cap")
    eventually(lambda: show in woken, RECENT, "its clusters awake")
    eventually(lambda: idle([worker.events._resync for worker in fleet]), RECENT, "an end of it")
    assert 1 <= len(looks) <= len(tried), "not more often than something could not be read"
