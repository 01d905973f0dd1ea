"""What every task does first, called as a worker calls it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import pytest
from celery import Celery
from prometheus_client import REGISTRY
from redis import Redis
from sqlalchemy.exc import OperationalError
from structlog.testing import capture_logs

import celeryconfig
from opencue_sched.accounting.ledger import Ledger
from opencue_sched.celery import app as real_app
from opencue_sched.clients.lua_scripts import Fence
from opencue_sched.coordination import replies, transport
from opencue_sched.coordination.keys import job_hash, reply_queue
from opencue_sched.coordination.presence import WorkerState
from opencue_sched.dispatch.cluster_pass import PassRunner
from opencue_sched.dispatch.dispatcher import Dispatcher
from opencue_sched.dispatch.report import PassEnd, PassReport
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.errors import FencedOff
from opencue_sched.settings import Settings
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker.messenger import NORMAL, URGENT
from opencue_sched.worker.process import Process
from opencue_sched.worker.task import SchedulerTask
from tests.kit.brief_fleet import open_counters
from tests.kit.gathering import counted_statements

DISPATCH = "opencue_sched.dispatch.dispatch_cluster"
SWEEP = "opencue_sched.sweep.sweep_clusters"


@pytest.fixture(autouse=True)
def process(settings: Settings, redis_client: Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[Process]:
    for name in celeryconfig.imports:
        importlib.import_module(name)
    app = Celery("task", broker="memory://", set_as_current=False)
    made = Process(settings, app)
    monkeypatch.setattr("opencue_sched.worker.process.process", lambda _app: made)
    yield made
    made.close()
    app.close()


def unreadable_messages() -> float:
    """How many this process has counted."""
    return REGISTRY.get_sample_value("scheduler_messages_unreadable_total") or 0.0


@contextmanager
def rejected(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Why the messages were rejected, as the log says it of the first of each kind."""
    monkeypatch.setattr(transport, "_logged", set())
    reasons: list[str] = []
    with capture_logs() as logged:
        yield reasons
    reasons += [f"{line['what']}: {line['reason']}" for line in logged if line["event"] == "message_unreadable"]


@pytest.mark.parametrize(
    ("task", "args", "kwargs", "words"),
    [
        (DISPATCH, [], {}, "posting: Missing required argument"),
        (DISPATCH, ["one", "two", "three", "four"], {}, ": Unexpected positional argument"),
        (DISPATCH, ["one"], {"surprise": 1}, "surprise: Unexpected keyword argument"),
        (SWEEP, [17], {}, ": Unexpected positional argument"),
        (DISPATCH, ["a" * 40], {"ticket": "3"}, "ticket: Input should be a valid integer"),
        (DISPATCH, ["a" * 40], {"ticket": True}, "ticket: Input should be a valid integer"),
        (DISPATCH, ["a" * 40], {"reply": "../etc/passwd"}, "reply: String should match pattern"),
        *((DISPATCH, [it], {}, "0: String should match") for it in ("", "x" * 40, "a" * 41, "a" * 40 + "\n")),
        *((DISPATCH, [it], {}, "0: Input should be a valid string") for it in (None, 7, ["a"])),
    ],
)
def test_a_message_without_the_arguments_of_its_task_is_rejected(monkeypatch, task, args, kwargs, words):
    before = unreadable_messages()
    with rejected(monkeypatch) as reasons:
        for _ in range(2):
            assert real_app.tasks[task](*args, **kwargs) == {"dropped": "malformed"}
    (reason,) = reasons
    assert reason.startswith(f"{task}: ")
    assert words in reason
    assert unreadable_messages() - before == 2


def test_a_periodic_sweep_of_a_farm_with_nothing_to_do_naps(process):
    # given who asks for sweeps: the task, twice, and then a notification
    asked, reports = [], []
    process.sweeper.sweep = partial(_noting, process.sweeper.sweep, asked, reports)
    for _ in range(2):
        real_app.tasks[SWEEP]()
    process.sweep(wake_shows={"a show"})
    # then the second of the task scans nothing, and the notification's may not nap
    assert [report.scan_seconds is None for report in reports[:2]] == [False, True]
    assert [each["may_nap"] for each in asked] == [True, True, False]


def _noting(sweep, asked, reports, **options):
    asked.append(options)
    reports.append(sweep(**options))
    return reports[-1]


# Who sent it

RECOMPUTE = "opencue_sched.accounting.recompute"
RESEED = "opencue_sched.accounting.reseed_limits"
RESERVATION_TASK = "opencue_sched.maintenance.keep_promises"


@contextmanager
def message_of(task: str, **headers: object) -> Iterator[SchedulerTask]:
    """The task, as it is run for a message with these headers."""
    found = real_app.tasks[task]
    found.push_request(**headers)
    try:
        yield found
    finally:
        found.pop_request()


@pytest.mark.parametrize("task", [SWEEP, RECOMPUTE, RESEED])
def test_what_a_leader_sent_is_done_under_its_fence_and_ends_when_it_was_succeeded(process, monkeypatch, task):
    # given a leader, and another that is elected while the task runs
    asked: list[tuple[int, int]] = []

    def succeeded(*given: object, fence: Fence | None = None, **_: object) -> None:
        ledgers = [value for value in given if isinstance(value, Ledger)]
        number = fence.number if fence is not None else ledgers[0]._fence.number
        asked.append((number, process.membership.workload.in_hand))
        raise FencedOff("succeeded")

    monkeypatch.setattr(process.sweeper, "sweep", succeeded)
    monkeypatch.setattr("opencue_sched.accounting.recompute.recompute", succeeded)
    monkeypatch.setattr("opencue_sched.accounting.caps.reseed_limits", succeeded)
    process.client.set(process.leader_keys.fence, 5)
    # then its fence goes with all that is changed, the task counts as in hand, and its end is no failure
    with message_of(task, fence=5, tick=7, tick_of="x@2") as run:
        assert run() == {"dropped": "fenced_off"}
    assert asked == [(5, 1)]
    assert process.membership.workload.in_hand == 0


def test_a_worker_changes_nothing_for_a_leader_that_was_succeeded(process, engine):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        show = farm.show("show", managed=True)
        farm.subscription(show, farm.default_alloc(), burst=1000)
        farm.job(show=show)
    open_counters(process.client)
    process.client.set(process.leader_keys.fence, 5)
    for name in (SWEEP, RECOMPUTE, RESEED):
        with message_of(name, fence=4) as task, pytest.raises(FencedOff):
            task.run()
    assert process.postings.posted() == {}


@pytest.mark.parametrize("emptied", [False, True])
@pytest.mark.parametrize(
    ("headers", "ended"),
    [
        ({"fence": 2, "tick": 7, "tick_of": "x@2", "catch_up": "latest"}, "run"),
        ({"fence": 1, "tick": 7, "tick_of": "x@2", "catch_up": "latest"}, "former_leader"),
        ({"fence": 2, "tick": 6, "tick_of": "x@2", "catch_up": "latest"}, "overtaken"),
        ({}, "run"),
    ],
)
def test_what_a_former_leader_sent_or_a_later_tick_overtook_is_dropped(
    process, engine, monkeypatch, headers, ended, emptied
):
    """Also where Redis was emptied: PostgreSQL knows."""
    fences, keys = PersistentFences(engine), process.leader_keys
    assert fences.claim(keys.name, 2)
    assert fences.claim_tick(keys.name, 2, "x@2", 7)[0]
    if not emptied:
        process.client.set(keys.fence, 2)
    monkeypatch.setattr("opencue_sched.accounting.caps.reseed_limits", lambda *_: ("run", 0))
    with message_of(RESEED, **headers) as run:
        assert next(iter(run().values())) == ended


@pytest.mark.parametrize(("task", "looks"), [(SWEEP, 0), (RESERVATION_TASK, 0), (RESEED, 1)])
def test_the_record_is_read_for_what_does_more_than_its_fence_guards(process, task, looks):
    open_counters(process.client)
    with counted_statements(process.engine) as statements, message_of(task, fence=5, tick=7, tick_of="x@2") as run:
        assert "dropped" not in run()
    assert sum(it.lstrip().startswith("SELECT name, fence") for it in statements) == looks


# Somebody waits for the pass


@pytest.fixture
def posting(process: Process) -> str:
    """A cluster that may be worked on."""
    cluster = Cluster("facility", "show", ClusterKind.MANUAL, ("fast",))
    return process.postings.enqueue([cluster])[0].uuid


@pytest.fixture
def waiter(redis_client: Redis) -> str:
    return replies.open_job(redis_client, "cue", "dispatch", waits_seconds=10)


class Dropped(Exception):
    """Nobody thought of this."""


def break_off(*_: object) -> PassReport:
    raise Dropped("no such column")


@pytest.mark.parametrize("popped", [False, True])
def test_a_pass_that_crashes_tells_who_waits_for_it(redis_client, posting, waiter, monkeypatch, popped):
    monkeypatch.setattr(Dispatcher, "dispatch", break_off)
    with pytest.raises(Dropped):
        real_app.tasks[DISPATCH](posting, reply=waiter)
    if popped:  # by somebody else: the hash says the same
        assert redis_client.lpop(reply_queue("cue", waiter))
    answer = replies.await_reply(redis_client, "cue", waiter, timeout_seconds=1)
    assert answer == {"posting": posting, "ended": "failed", "error": "Dropped: no such column"}
    assert redis_client.hget(job_hash("cue", waiter), "status") == "failed"


def test_a_pass_that_a_store_ended_says_why(redis_client, posting, waiter, monkeypatch):
    def lose_connection(*_: object, **__: object) -> PassReport:
        raise OperationalError("SELECT", {}, Exception("the server closed the connection"))

    monkeypatch.setattr(PassRunner, "run", lose_connection)
    real_app.tasks[DISPATCH](posting, reply=waiter)
    answer = replies.await_reply(redis_client, "cue", waiter, timeout_seconds=1)
    assert answer["ended"] == "query_error"
    assert "the server closed the connection" in answer["error"]


@pytest.mark.parametrize("told", [True, False])
def test_who_waits_for_a_message_that_is_rejected_is_told(redis_client, waiter, told):
    before = unreadable_messages()
    real_app.tasks[DISPATCH]("no posting", reply=waiter if told else "../" + waiter)
    assert unreadable_messages() - before == 1
    if told:
        answer = replies.await_reply(redis_client, "cue", waiter, timeout_seconds=1)
        assert (answer["posting"], answer["ended"]) == ("no posting", "failed")
        assert answer["error"].startswith("InvalidInput: ")


def test_a_message_given_back_is_answered_by_who_takes_it_next(process, redis_client, posting, waiter, monkeypatch):
    # given a worker that takes no work
    sent = []
    monkeypatch.setattr(process.messenger, "_send", lambda *args, **kwargs: sent.append((args, kwargs)))
    process.membership.workload.become(WorkerState.PAUSED)
    assert real_app.tasks[DISPATCH](posting, ticket=3, reply=waiter) == {"ended": "given back"}
    assert redis_client.hget(job_hash("cue", waiter), "status") == "dispatched"
    # when another one takes the message
    ((_, message),) = sent
    assert (message["args"], message["kwargs"]) == ((posting,), {"ticket": 3, "reply": waiter})
    assert message["priority"] == URGENT == 0
    process.membership.workload.become(WorkerState.WORKING)
    real_app.tasks[DISPATCH](*message["args"], reply=message["kwargs"]["reply"])
    # then the answer comes
    assert replies.await_reply(redis_client, "cue", waiter, timeout_seconds=1)["ended"] in list(PassEnd)


def test_a_message_that_nobody_waits_for_is_given_back_as_it_came(process, posting, monkeypatch):
    sent = []
    monkeypatch.setattr(process.messenger, "_send", lambda *_, **kwargs: sent.append(kwargs))
    process.membership.workload.become(WorkerState.PAUSED)
    real_app.tasks[DISPATCH](posting)
    assert (sent[0]["kwargs"], sent[0]["priority"]) == ({}, NORMAL)
