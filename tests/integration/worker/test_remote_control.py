"""Remote control by the broker: of two fleets on one Redis, each hears its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace

import pytest
from celery import Celery
from celery.app.control import Control
from kombu import Queue

from opencue_sched.cli.ctl import addressees
from opencue_sched.coordination.keys import QueueType, consumed_queues, control_exchange
from opencue_sched.coordination.presence import Presence, WorkerState, list_members
from opencue_sched.coordination.transport import broker_settings, guard_transports
from opencue_sched.worker import control
from opencue_sched.worker.control import broadcast
from opencue_sched.worker.workload import Workload
from tests.kit.polling import eventually

NODE = "celery@here"
COMMANDS = ("pause_dispatch", "resume_dispatch", "drain", "stop_worker")

Start = Callable[[str, str | None, str], list[dict]]


@pytest.fixture
def app(redis_server, redis_client) -> Iterator[Celery]:
    guard_transports()
    made = Celery("control", broker=broker_settings(redis_server.url).url, set_as_current=False)
    yield made
    made.close()


@contextmanager
def listening(app: Celery, client, facility: str | None, heard: list[dict]) -> Iterator[None]:
    """What a worker of that facility hears, by the mailbox it has; nodes of all fleets have the same name."""

    def hear(state, **arguments):
        heard.append(arguments)
        return {"ok": facility}

    ended = threading.Event()
    before = client.pubsub_numpat()

    def listen() -> None:
        with app.connection() as connection:
            handlers = dict.fromkeys(COMMANDS, hear)
            app.conf.control_exchange = control_exchange("cue", facility)
            mailbox = Control(app).mailbox(connection)
            node = mailbox.Node(NODE, state=None, handlers=handlers, channel=connection.channel())
            with node.listen():
                while not ended.is_set():
                    try:
                        connection.drain_events(timeout=0.05)
                    except TimeoutError:
                        continue

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        eventually(lambda: client.pubsub_numpat() > before, 10, "a subscription")
        yield
    finally:
        ended.set()
        thread.join()


@pytest.fixture
def start(app, redis_client) -> Iterator[Start]:
    """Starts a worker's ears; what it hears."""
    with ExitStack() as stack:

        def present(instance: str, facility: str | None, group: str) -> list[dict]:
            heard: list[dict] = []
            Presence(
                redis_client,
                "cue",
                types=("dispatch",),
                group=group,
                instance=instance,
                node=NODE,
                facility=facility,
            ).announce()
            stack.enter_context(listening(app, redis_client, facility, heard))
            return heard

        yield present


def say(app, client, facility: str | None, group: str | None, command: str, instance: str | None = None) -> list[dict]:
    """The answers, without the node's name."""
    meant = addressees(list_members(client, "cue"), facility, "dispatch", group, instance)
    replies = broadcast(app, "cue", command, meant, wait_seconds=60)
    return [answer for reply in replies for answer in reply.values()]


@pytest.mark.parametrize("command", ["pause_dispatch", "stop_worker"])
def test_a_fleet_hears_what_is_said_to_its_group_and_no_other_does(app, redis_client, start, command):
    """Even when instances and nodes have the same names."""
    alpha, beta = start("w1", "Alpha", "alpha"), start("w1", "beta", "beta")
    assert say(app, redis_client, None, "beta", command, "w1") == [{"ok": "beta"}]
    assert (len(alpha), len(beta)) == (0, 1)
    assert say(app, redis_client, "Alpha", None, command) == [{"ok": "Alpha"}]
    assert (len(alpha), len(beta)) == (1, 1)


def test_what_is_said_to_a_type_is_for_fleets_of_no_facility(app, redis_client, start):
    alpha, other = start("w1", "Alpha", "alpha"), start("w1", None, "default")
    assert say(app, redis_client, None, None, "drain") == [{"ok": None}]
    assert (len(alpha), len(other)) == (0, 1)
    app.conf.control_exchange = control_exchange("cue", None)
    Control(app).broadcast("drain", reply=True, timeout=60, limit=1)
    assert (len(alpha), len(other)) == (0, 2), "as `celery control` says it, to everybody"


def test_where_nobody_of_the_fleet_is_nobody_else_answers(app, redis_client, start):
    alpha = start("w1", "Alpha", "alpha")
    assert say(app, redis_client, None, None, "drain") == []
    assert alpha == []


@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_said_to_another_instance_of_the_same_node_name_is_for_that_one_alone(app, monkeypatch, command):
    """Celery's names of nodes need not be unique."""
    told: list[str] = []
    membership = SimpleNamespace(workload=Workload(), in_flight=lambda: 0)
    mine = SimpleNamespace(membership=membership, settings=SimpleNamespace(instance="w1"))
    monkeypatch.setattr("os.kill", lambda *_: told.append("kill"))
    app.conf.task_queues = []
    heard = getattr(control, command)
    before = membership.workload.state
    state = SimpleNamespace(app=app, consumer=None)
    app.process = mine
    assert heard(state, instances=["w2", "w3"]).keys() == {"ok"}
    assert (told, membership.workload.state) == ([], before)
    heard(state, instances=["w2", "w1"])
    assert told or membership.workload.state is not before


@pytest.mark.parametrize("how", ["pause_dispatch", "drain"])
def test_what_is_consumed_again_is_so_after_a_reconnect_too(app, how):
    """Then Celery consumes what its application says; its consumer of 5.6 does not tell that of what it adds."""
    names = [name for type_ in QueueType for name in consumed_queues("cue", type_.value, "default", "w1")]
    app.conf.task_queues = [Queue(name) for name in names]
    queues = app.amqp.queues
    consumer = SimpleNamespace(cancel_task_queue=queues.deselect, add_task_queue=lambda _: None)
    state = SimpleNamespace(app=app, consumer=consumer)
    membership = SimpleNamespace(workload=Workload(), in_flight=lambda: 0)
    app.process = SimpleNamespace(membership=membership)
    getattr(control, how)(state)
    left = set(queues.consume_from)
    kept = {name for name in names if ":dispatch:" not in f"{name}:"} if how == "pause_dispatch" else set()
    assert left == kept
    control.resume_dispatch(state)
    assert set(queues.consume_from) == set(names)
    assert membership.workload.state is WorkerState.WORKING
