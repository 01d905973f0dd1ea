"""The four ways in which releases reach the ledger, through what a worker runs: each with procs deleted by others."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, replace
from urllib.parse import urlsplit

import pytest
from celery import Celery
from prometheus_client import REGISTRY
from pydantic import SecretStr
from sqlalchemy import Engine, text
from structlog.testing import capture_logs

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import Booking, unpack_entry
from opencue_sched.clients.lua_scripts import load_script
from opencue_sched.domain.invariants import Invariant
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.insight.audit import Severity, run_audit
from opencue_sched.settings import Accounting, Coordination, Settings
from opencue_sched.worker import metrics, process
from opencue_sched.worker.process import Process
from tasks import accounting
from tests.conftest import RedisServer
from tests.kit.cuebot_publish import PUBLISH
from tests.kit.listening import eventually_listen
from tests.kit.lossy_proxy import LossyProxy
from tests.kit.polling import eventually
from tests.kit.redis_log import RedisLog
from tests.kit.tasks import run_task

RECENT = 20.0

Start = Callable[..., Process]


@pytest.fixture
def start(settings: Settings, engine: Engine) -> Iterator[Start]:
    """A worker's stores and listener with a release feed, its counters filled."""
    started: list[Process] = []
    with ExitStack() as stack:

        def made(feed: str, instance: str = "one", *, fleet_start: bool = True, **stores: object) -> Process:
            changed = settings.model_copy(
                update={
                    **stores,
                    "instance": instance,
                    "accounting": Accounting(release_feed=feed, commit_deadline=0.025),
                    "coordination": Coordination(lease_ttl=4),
                }
            )
            app = Celery("feeds", broker="memory://", set_as_current=False)
            stack.callback(app.close)
            mine = Process(changed, app)
            stack.callback(mine.close)
            mine.bootstrap(fleet_start=fleet_start)
            mine.listen()
            started.append(mine)
            eventually_listen(engine, len(started))
            return mine

        yield made


@pytest.fixture
def procs(engine: Engine) -> list[str]:
    """Six procs of two cores that run, on a host for which a frame waits."""
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.default_show()
        host = farm.host(cores=64)
        farm.job()
        return farm.run(farm.job([LayerSpec(frames=6)]).frames, host, cores=2)


def delete(engine: Engine, proc_id: str) -> None:
    """Somebody deletes a proc."""
    with engine.begin() as connection:
        connection.execute(text("DELETE FROM proc WHERE pk_proc = :id"), {"id": proc_id})


@pytest.fixture
def log(redis_server: RedisServer) -> Iterator[RedisLog]:
    """What Redis is asked."""
    with RedisLog(redis_server.url) as log:
        yield log


@dataclass(frozen=True)
class Sweeps:
    """The sweeps of a worker in a farm where work waits for the host of the procs."""

    worker: Process
    log: RedisLog

    def woke(self, since: int) -> bool:
        """Whether one of the sweeps since so many were made has woken a cluster."""
        return any(re.search(r" [0-4] 1( |$)", call.text) for call in self.log.calls("board_enqueue")[since:])

    def made(self) -> int:
        return len(self.log.calls("board_enqueue"))

    def one_more(self) -> bool:
        """Have a sweep made for a show that nobody knows; whether that has woken something all the same."""
        before = self.made()
        self.worker.waker.note(shows={"nobody"})
        eventually(lambda: self.made() > before, RECENT, "a sweep")
        return self.woke(before)


def test_a_freed_host_is_swept_for_after_its_release(
    start: Start, settings: Settings, redis_server: RedisServer, engine: Engine, procs: list[str], log: RedisLog
) -> None:
    parts = urlsplit(redis_server.url)
    with closing(LossyProxy(str(parts.hostname), int(parts.port or 0))) as proxy:
        url = settings.redis_dsn.replace(f":{parts.port}", f":{proxy.port}")
        sweeps = Sweeps(start("proc-trigger", redis_url=SecretStr(url)), log)
        eventually(lambda: not sweeps.one_more(), RECENT, "the end of what a start leads to")
        before = sweeps.made()
        # given a worker that hears of a release, on whose way to the ledger it waits
        proxy.hold(load_script("release").sha)
        delete(engine, procs[0])
        assert proxy.holds.wait(100)
        # when it sweeps for something else, then nothing is woken for the host
        assert not sweeps.one_more()
        # and when the ledger has the release, then clusters are
        proxy.let_go()
        eventually(lambda: sweeps.woke(before), RECENT, "the sweep for the host")


def test_a_freed_host_is_swept_for_also_when_its_release_fails(
    start: Start, engine: Engine, procs: list[str], log: RedisLog
) -> None:
    # given a worker whose ledger is gone
    worker = start("proc-trigger")
    sweeps = Sweeps(worker, log)
    eventually(lambda: not sweeps.one_more(), RECENT, "the end of what a start leads to")
    before = sweeps.made()
    worker.client.delete(keys.EPOCH)
    # when a proc is deleted, then clusters are woken for its host all the same
    delete(engine, procs[0])
    eventually(lambda: sweeps.woke(before), RECENT, "the sweep for the host")


def without_our_triggers(engine: Engine) -> None:
    """As on a database where none may be added."""
    with engine.begin() as connection:
        connection.execute(text("DROP TRIGGER opencue_sched_proc_released ON proc"))
        connection.execute(text("DROP TRIGGER opencue_sched_caps_update ON subscription"))


def ids(mine: Process) -> set[str]:
    return set(mine.client.hkeys(keys.LEDGER))


def booking(mine: Process, proc_id: str) -> Booking:
    return next(unpack_entry(proc_id, record.entry) for record in mine.ledger.records() if record.proc_id == proc_id)


def burst(mine: Process) -> str:
    where = show_and_alloc(mine.engine)
    return str(mine.client.hget(keys.subscription(where["show"], where["alloc"]), "burst"))


def show_and_alloc(engine: Engine) -> dict[str, str]:
    """Where the procs run. (A schema made by Cuebot comes with a show of its own.)"""
    query = "SELECT DISTINCT proc.pk_show, host.pk_alloc FROM proc JOIN host USING (pk_host)"
    with engine.connect() as connection:
        show, alloc = connection.execute(text(query)).one()
    return {"show": show, "alloc": alloc}


def set_burst(engine: Engine, centicores: int) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = :burst"), {"burst": centicores})


def exact(mine: Process) -> None:
    """Counters are the sums of their entries, and the entries are the procs. (Frames and hosts were not told.)"""
    checks = {check.what: check for check in run_audit(mine.engine, mine.client, mine.settings).findings}
    assert [checks[name].level for name in (Invariant.COUNTERS_MATCH_LEDGER, Invariant.LEDGER_MATCHES_PROCS)] == [
        Severity.OK
    ] * 2


def test_proc_trigger_releases_by_id_and_hears_caps(
    engine: Engine, procs: list[str], start: Start, log: RedisLog
) -> None:
    first, second = start("proc-trigger"), start("proc-trigger", "two", fleet_start=False)
    delete(engine, procs[0])
    eventually(lambda: len(log.calls("release", naming=procs[0])) == 2, RECENT, "what every worker hears")
    eventually(lambda: ids(first) == set(procs[1:]), RECENT, "the release")
    set_burst(engine, 400)
    eventually(lambda: burst(second) == "4", RECENT, "the cap")
    exact(first)


def test_cuebot_redis_takes_plain_decrements(engine: Engine, procs: list[str], start: Start):
    mine = start("cuebot-redis")
    released = booking(mine, procs[0])
    five = keys.counted(released.vertices)[:5]
    job = keys.job(released.vertices.job_id)
    # when a Cuebot publishes one release, and loses another
    delete(engine, procs[0])
    mine.client.eval(PUBLISH, 6, *five, keys.SEQ, -released.cores, -released.gpus)
    delete(engine, procs[1])
    assert mine.client.hget(job, "int_cores") == "10"
    assert ids(mine) == set(procs), "no release by id: it would be taken off twice"
    # then a recompute brings both in line
    run_task(accounting.recompute, mine)
    assert mine.client.hget(job, "int_cores") == "8"
    assert ids(mine) == set(procs[2:])
    exact(mine)


def test_a_cuebot_that_does_not_publish_is_told_of_until_it_does(
    engine: Engine, procs: list[str], start: Start, monkeypatch: pytest.MonkeyPatch
):
    # given two workers that count on Cuebots to publish what they release
    first, second = start("cuebot-redis"), start("cuebot-redis", "two", fleet_start=False)
    metrics.publish_misconfigured.set(0)
    # when one releases a proc and publishes nothing
    delete(engine, procs[0])
    with capture_logs() as logs:
        run_task(accounting.recompute, first)
    # then the recompute says so, and how much that was
    warns(logs)
    (told,) = [str(line["message"]) for line in logs if line["event"] == "release_feed"]
    assert "2 cores" in told
    assert "accounting.redis.enabled" in told
    first.keep_counters()
    assert REGISTRY.get_sample_value("cuebot_redis_publish_misconfigured") == 1
    # and when another worker makes the next recompute, two minutes later, which finds nothing, then neither does
    now = process.boot_clock() + 120
    monkeypatch.setattr(process, "boot_clock", lambda: now)
    run_task(accounting.recompute, second)
    metrics.publish_misconfigured.set(1)  # as of the first: both are in this process
    first.keep_counters()
    assert REGISTRY.get_sample_value("cuebot_redis_publish_misconfigured") == 0


def test_recompute_only_waits_for_the_recompute_and_is_told_of(engine: Engine, procs: list[str], start: Start):
    mine = start("recompute-only")
    delete(engine, procs[0])
    set_burst(engine, 400)
    eventually(lambda: burst(mine) == "4", RECENT, "the cap, which our trigger announces all the same")
    assert ids(mine) == set(procs)
    with capture_logs() as logs:
        run_task(accounting.recompute, mine)
    assert ids(mine) == set(procs[1:])
    exact(mine)
    warns(logs)


def warns(logs: Sequence[Mapping[str, object]]) -> None:
    assert REGISTRY.get_sample_value("cuebot_redis_publish_misconfigured") == 1
    assert [line["log_level"] for line in logs if line["event"] == "release_feed"] == ["warning"]


@pytest.mark.parametrize(("feed", "triggers"), [("recompute-only", True), ("proc-trigger", False)])
def test_a_worker_whose_feed_cannot_deliver_warns_and_starts(
    engine: Engine, procs: list[str], start: Start, feed: str, triggers: bool
):
    if not triggers:
        without_our_triggers(engine)
    mine = start(feed)
    metrics.publish_misconfigured.set(0)
    with capture_logs() as logs:
        mine.check_feed()
        mine.bootstrap(fleet_start=True)
    warns(logs)
    assert mine.ledger.book([replace(booking(mine, procs[0]), proc_id="new")]).accepted == {"new"}
