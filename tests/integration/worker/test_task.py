"""What every task does first, called as a worker calls it."""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from uuid import uuid4

import pytest
from celery import Celery
from kombu.simple import SimpleQueue
from prometheus_client import REGISTRY
from redis import Redis
from sqlalchemy import Engine
from sqlalchemy.exc import NotSupportedError, OperationalError
from structlog.testing import capture_logs

import celeryconfig
from opencue_sched.celery import app as real_app
from opencue_sched.coordination import replies
from opencue_sched.coordination.keys import job_hash, reply_queue
from opencue_sched.coordination.presence import WorkerState
from opencue_sched.dispatch.report import PassEnd
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.errors import FencedOff
from opencue_sched.settings import Settings
from opencue_sched.store.fences import PersistentFences
from opencue_sched.worker.messenger import NORMAL, URGENT
from opencue_sched.worker.process import Process
from opencue_sched.worker.task import SchedulerTask
from tests.kit.brief_fleet import open_counters
from tests.kit.statements import failing_statements, listening
from tests.kit.tasks import in_process
from tests.kit.wording import lacks

DISPATCH = "opencue_sched.dispatch.dispatch_cluster"
SWEEP = "opencue_sched.sweep.sweep_clusters"


@pytest.fixture
def app() -> Iterator[Celery]:
    with Celery("task", broker="memory://", set_as_current=False) as made:
        yield made


@pytest.fixture(autouse=True)
def process(settings: Settings, redis_client: Redis, app: Celery) -> Iterator[Process]:
    for name in celeryconfig.imports:
        importlib.import_module(name)
    with closing(Process(settings, app)) as made, in_process(made):
        yield made


@pytest.fixture
def messages(app: Celery, process: Process) -> Iterator[SimpleQueue]:
    """What the process sends for whichever worker takes it."""
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(str(process.membership.router.queue_of_all()))
        queue.clear()
        yield queue


def unreadable_messages() -> float:
    """How many this process has counted."""
    return REGISTRY.get_sample_value("scheduler_messages_unreadable_total") or 0.0


@pytest.mark.parametrize(
    ("task", "args", "kwargs"),
    [
        (DISPATCH, [], {}),
        (DISPATCH, ["a" * 40, None, None, "four"], {}),
        (DISPATCH, ["a" * 40], {"surprise": 1}),
        (SWEEP, [17], {}),
        (DISPATCH, ["a" * 40], {"ticket": "3"}),
        (DISPATCH, ["a" * 40], {"ticket": True}),
        (DISPATCH, ["a" * 40], {"reply": "../etc/passwd"}),
        *((DISPATCH, [posting], {}) for posting in ("", "x" * 40, "a" * 41, "a" * 40 + "\n", None, 7, ["a"])),
    ],
)
def test_a_message_without_the_arguments_of_its_task_is_rejected(task, args, kwargs):
    before = unreadable_messages()
    assert real_app.tasks[task](*args, **kwargs) == {"dropped": "malformed"}
    assert unreadable_messages() - before == 1


def take_frames(frames: int) -> int:
    return frames


def test_of_messages_of_a_task_without_its_arguments_the_first_is_logged_with_what_is_wrong():
    # given a task of which nobody has had a message
    task = real_app.task(name=f"task-{uuid4().hex}")(take_frames)

    # when two messages come without its argument
    with capture_logs() as logs:
        for kwargs in ({"frames": "many"}, {}):
            assert task(**kwargs) == {"dropped": "malformed"}
    real_app.tasks.unregister(task.name)

    # then the log has the first, and which argument is wrong
    (line,) = [line for line in logs if line["event"] == "message_unreadable"]
    assert (line["what"], line["kind"], "frames" in line["reason"]) == (task.name, "malformed", True)


def statements_of(engine: Engine, act: Callable[[], object]) -> int:
    """How many statements an act sends from its own thread."""
    sent: list[int] = []
    with listening(engine, "before_cursor_execute", lambda *_: sent.append(threading.get_ident())):
        act()
    return sent.count(threading.get_ident())


def test_a_periodic_sweep_of_a_farm_with_nothing_to_do_naps(process):
    # when the task sweeps twice, and then a notification asks for a sweep
    first, second = (statements_of(process.engine, real_app.tasks[SWEEP]) for _ in range(2))
    notified = statements_of(process.engine, lambda: process.sweep(wake_hosts={"a host"}))
    # then the second of the task asks PostgreSQL nothing, and the notification's may not nap
    assert (first > 0, second, notified > 0) == (True, 0, True)


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
def test_what_a_leader_sent_is_done_under_its_fence_and_ends_when_it_was_succeeded(process, engine, task):
    # given a leader, and another that is elected while the task reads
    with_waiting_work(engine)
    open_counters(process.client)
    process.client.set(process.leader_keys.fence, 5)
    in_hand: list[int] = []

    def elect_another(*_: object) -> None:
        in_hand.append(process.membership.workload.in_hand)
        process.client.set(process.leader_keys.fence, 6)

    # then its fence goes with all that is changed, the task counts as in hand, and its end is no failure
    with (
        listening(process.engine, "before_cursor_execute", elect_another),
        message_of(task, fence=5, tick=7, tick_of="x@2") as run,
    ):
        assert run() == {"dropped": "fenced_off"}
    assert in_hand[0] == 1
    assert process.membership.workload.in_hand == 0
    assert process.postings.posted() == {}


def with_waiting_work(engine: Engine) -> None:
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host()
        show = farm.show("show", managed=True)
        farm.subscription(show, farm.default_alloc(), burst=1000)
        farm.job(show=show)


def test_a_worker_changes_nothing_for_a_leader_that_was_succeeded(process, engine):
    with_waiting_work(engine)
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
        ({"fence": 2, "tick": 7, "tick_of": "x@2", "catch_up": "latest"}, None),
        ({"fence": 1, "tick": 7, "tick_of": "x@2", "catch_up": "latest"}, "former_leader"),
        ({"fence": 2, "tick": 6, "tick_of": "x@2", "catch_up": "latest"}, "overtaken"),
        ({}, None),
    ],
)
def test_what_a_former_leader_sent_or_a_later_tick_overtook_is_dropped(process, engine, headers, ended, emptied):
    """Also where Redis was emptied: PostgreSQL knows."""
    fences, keys = PersistentFences(engine), process.leader_keys
    assert fences.claim(keys.name, 2)
    assert fences.claim_tick(keys.name, 2, "x@2", 7)[0]
    open_counters(process.client)
    if not emptied:
        process.client.set(keys.fence, 2)
    with message_of(RESEED, **headers) as run:
        assert run().get("dropped") == ended


@pytest.mark.parametrize(("task", "looks"), [(SWEEP, 0), (RESERVATION_TASK, 0), (RESEED, 1)])
def test_the_record_is_read_for_what_does_more_than_its_fence_guards(process, task, looks):
    open_counters(process.client)
    asked: list[list[object]] = []
    with (
        listening(process.engine, "before_cursor_execute", lambda *seen: asked.append([*dict(seen[3]).values()])),
        message_of(task, fence=5, tick=7, tick_of="x@2") as run,
    ):
        assert "dropped" not in run()
    assert asked.count([process.leader_keys.name]) == looks


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


@pytest.mark.parametrize("popped", [False, True])
@pytest.mark.parametrize(
    "error", [Dropped("no such column"), NotSupportedError("SELECT", {}, Dropped("no such column"))]
)
def test_a_pass_that_crashes_tells_who_waits_for_it(process, redis_client, posting, waiter, popped, error):
    # given a database that no pass can be made ready on
    with failing_statements(process.engine, error), pytest.raises(type(error)):
        real_app.tasks[DISPATCH](posting, reply=waiter)
    if popped:  # by somebody else: the hash says the same
        assert redis_client.lpop(reply_queue("cue", waiter))
    answer = replies.await_reply(redis_client, "cue", waiter, timeout_seconds=1)
    assert (answer["posting"], answer["ended"]) == (posting, "failed")
    assert not lacks(answer["error"], type(error).__name__, "no such column")
    assert redis_client.hget(job_hash("cue", waiter), "status") == "failed"


def test_a_pass_that_a_store_ended_says_why(process, redis_client, posting, waiter):
    _ = process.dispatcher
    lost = OperationalError("SELECT", {}, Exception("the server closed the connection"))
    with failing_statements(process.engine, lost):
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


def test_a_message_given_back_is_answered_by_who_takes_it_next(process, redis_client, posting, waiter, messages):
    # given a worker that takes no work
    process.membership.workload.become(WorkerState.PAUSED)
    assert real_app.tasks[DISPATCH](posting, ticket=3, reply=waiter) == {"ended": "given back"}
    assert redis_client.hget(job_hash("cue", waiter), "status") == "dispatched"
    # when another one takes the message
    message = messages.get(block=False)
    args, named, _ = message.payload
    assert (args, named) == ([posting], {"ticket": 3, "reply": waiter})
    assert message.properties["priority"] == URGENT == 0
    process.membership.workload.become(WorkerState.WORKING)
    real_app.tasks[DISPATCH](*args, reply=named["reply"])
    # then the answer comes
    assert replies.await_reply(redis_client, "cue", waiter, timeout_seconds=1)["ended"] in list(PassEnd)


def test_a_message_that_nobody_waits_for_is_given_back_as_it_came(process, posting, messages):
    process.membership.workload.become(WorkerState.PAUSED)
    real_app.tasks[DISPATCH](posting)
    message = messages.get(block=False)
    assert (message.payload[1], message.properties["priority"]) == ({}, NORMAL)
