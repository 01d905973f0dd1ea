"""The queues through a real Celery worker: their order, the age at which a queue is asked first, and garbage."""

from __future__ import annotations

import base64
import json
import sys
import textwrap
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kombu import Queue

from benchmarks.warm_start import WarmProcess
from opencue_sched.coordination.keys import consumed_queues, control_exchange
from opencue_sched.coordination.transport import broker_settings
from opencue_sched.embedded.servers.processes import GuardedProcess
from tests.kit.polling import eventually

ROOT = Path(__file__).resolve().parents[2]
TASK = "opencue_sched.dispatch.dispatch_cluster"
LATE_TASK = "opencue_sched.accounting.recompute"
"""One that is acknowledged when it has ended."""
INSTANCE, GROUP, TYPE = consumed_queues("cue", "dispatch", "default", "one")

# The configuration a real worker has; only the task is another.
RECORDER = """
    import redis
    from celery import Celery
    import celeryconfig
    from opencue_sched.settings import get_settings

    import os
    import threading
    import time
    from functools import partial
    from opencue_sched.coordination import transport
    from prometheus_client import REGISTRY

    if age := os.environ.get("TEST_QUEUE_AGE"):
        order = partial(transport.AgedOrder, age_seconds=float(age))
        celeryconfig.broker_transport_options["queue_order_strategy"] = order

    celeryconfig.imports = ()
    app = Celery("recorder")
    app.config_from_object(celeryconfig)
    client = redis.Redis.from_url(get_settings().redis_dsn)

    def tell_what_was_counted():
        while True:
            client.set("unreadable", int(REGISTRY.get_sample_value("scheduler_messages_unreadable_total")))
            time.sleep(0.05)

    threading.Thread(target=tell_what_was_counted, daemon=True).start()

    @app.task(name="opencue_sched.dispatch.dispatch_cluster")
    def record(tag):
        client.rpush("order", tag)
        if tag == "again":
            from kombu import Queue
            record.apply_async(("again",), queue=Queue("cue:q:work:type:dispatch:group:default:inst:one"), declare=[])

    @app.task(name="opencue_sched.accounting.recompute", acks_late=True)
    def record_late(tag):
        client.rpush("order", tag)

    if __name__ == "__main__":
        app.Worker(pool_cls="solo", without_mingle=True).start()
"""


@pytest.fixture
def sender(redis_server):
    """A Celery client that sends to the queues as our messengers do."""
    broker = broker_settings(redis_server.url)
    app = Celery("sender", broker=broker.url, set_as_current=False)
    app.conf.update(
        broker_transport_options={"priority_steps": [0, 1, 2], "sep": ":prio:"},
        task_default_priority=1,
    )

    def send(queue: str, tag: str, *, priority: int = 1, name: str = TASK) -> None:
        app.send_task(name, args=(tag,), queue=Queue(queue), declare=[], priority=priority)

    yield send
    app.close()


@pytest.fixture
def start_worker(redis_server, redis_client, tmp_path):
    """Starts a worker with one thread, as instance ``one``.

    With a seed of hashes, which the interpreter reads first of all, it has everything to load: the same worker then,
    but without the command line, which would load all that ``celery`` can do.
    """
    (tmp_path / "recorder.py").write_text(textwrap.dedent(RECORDER), encoding="utf-8")
    running: list[GuardedProcess] = []

    def start(pool: str = "solo", **environment: str) -> GuardedProcess:
        import os

        inherited = {key: value for key, value in os.environ.items() if not key.startswith("OPENCUE_SCHED_")}
        seeded = "PYTHONHASHSEED" in environment
        process_type = GuardedProcess if seeded else WarmProcess
        arguments = (
            ["recorder"] if seeded else ["celery", "-A", "recorder", "worker", f"--pool={pool}", "--without-mingle"]
        )
        process = process_type(
            [sys.executable, "-m", *arguments],
            log=tmp_path / f"worker{len(running)}.log",
            env={
                **inherited,
                "PYTHONPATH": f"{tmp_path}:{ROOT}",
                "OPENCUE_SCHED_REDIS_URL": redis_server.url,
                "OPENCUE_SCHED_INSTANCE": "one",
                **environment,
            },
            cwd=tmp_path,
        ).start()
        running.append(process)
        return process

    yield start
    for process in running:
        process.stop()


def unreadable(client: redis.Redis) -> int:
    """How many messages the worker has counted as unreadable, as it says time and again."""
    return int(client.get("unreadable") or 0)


def order(client: redis.Redis) -> list[str]:
    return client.lrange("order", 0, -1)


def test_preloaded_queues_drain_from_the_most_specific_and_first_in_first_out(redis_client, sender, start_worker):
    """The order is the same under five hash seeds, each of which orders a set differently; priority 0 goes first."""
    for seed in range(5):
        redis_client.flushdb()
        for number in (1, 2):
            for queue, tag in ((TYPE, "type"), (GROUP, "group"), (INSTANCE, "instance")):
                sender(queue, f"{tag}-{number}")
        sender(TYPE, "urgent", priority=0)
        sender(INSTANCE, "idle", priority=2)
        worker = start_worker(PYTHONHASHSEED=str(seed), TEST_QUEUE_AGE="3600")
        eventually(lambda: len(order(redis_client)) == 8, 60, "drained queues")
        assert order(redis_client) == [
            "urgent",
            "instance-1",
            "instance-2",
            "group-1",
            "group-2",
            "type-1",
            "type-2",
            "idle",
        ], f"hash seed {seed}"
        worker.kill()


def test_no_queue_starves_beyond_its_age(redis_client, sender, start_worker):
    """While an instance queue is never empty, a message each for the group and the type is taken."""
    sender(INSTANCE, "again")
    start_worker(TEST_QUEUE_AGE="0.5")
    eventually(lambda: len(order(redis_client)) > 10, 60, "a busy instance queue")
    number = count()

    for _ in range(2):
        tags = {f"{queue}-{next(number)}" for queue in ("type", "group")}
        for tag in tags:
            sender(TYPE if tag.startswith("type") else GROUP, tag)
        eventually(lambda tags=tags: tags <= set(order(redis_client)), 30, "the others' turn")


def test_a_message_waits_for_no_more_others_than_there_are_queues_once_each_is_of_age(
    redis_client, sender, start_worker
):
    """When every queue is of age at once, each is asked first in its turn, however busy one of them is."""
    sender(INSTANCE, "again")
    start_worker(TEST_QUEUE_AGE="0.001")
    eventually(lambda: len(order(redis_client)) > 10, 60, "a busy instance queue")
    for queue in (TYPE, GROUP, TYPE, GROUP):
        tag = f"waited at {queue} since"
        sender("staging", tag)
        with redis_client.pipeline(transaction=True) as pipe:
            pipe.llen("order")
            pipe.lmove("staging:prio:1", f"{queue}:prio:1", "RIGHT", "LEFT")
            before, _ = pipe.execute()
        eventually(lambda before=before, tag=tag: tag in redis_client.lrange("order", before, -1), 30, "its turn")
        waited_for = redis_client.lrange("order", before, -1).index(tag)
        # One that was under way, and one for each of the twelve queues.
        assert waited_for <= 1 + 12, queue


BODY = '[["never"], {}, {}]'


def envelope(tag: object = "tag", /, **changes: object) -> str:
    """A message as kombu writes it, with ``changes``; to ``headers`` (None: without it) and ``properties`` as well."""
    headers = {"task": TASK, "id": f"id of {tag}", **changes.pop("headers", {})}
    headers = {name: value for name, value in headers.items() if value is not None}
    properties = {
        "delivery_tag": tag,
        "delivery_info": {"exchange": "", "routing_key": "elsewhere"},
        "body_encoding": "base64",
        **changes.pop("properties", {}),
    }
    body = changes.pop("body", BODY)
    if isinstance(body, str | bytes) and properties["body_encoding"] == "base64":
        body = base64.b64encode(body.encode() if isinstance(body, str) else body).decode()
    return json.dumps(
        {
            "content-type": "application/json",
            "content-encoding": "utf-8",
            "headers": headers,
            "properties": properties,
            "body": body,
            **changes,
        }
    )


# What kombu cannot take for a message.
GARBAGE = [
    "no json",
    "42",
    "[]",
    "{}",
    '{"properties": {}}',
    '{"properties": {"delivery_tag": "x"}}',
    "\u20ac",
    "[" * 9_000,
    envelope(body=3),
    envelope(body="%%%", properties={"body_encoding": "base64 "}),
    envelope(body="x", properties={"body_encoding": ["base64"]}),
    envelope(properties={"delivery_info": {}}),
    envelope(properties={"delivery_tag": None}),
    envelope(properties={"delivery_tag": ["x"]}),
    envelope(headers={"sent": {"__type__": "datetime", "__value__": "soon"}}),
]

# What kombu takes for one, and Celery cannot make a task of: what its kind has in the log, which has each kind once.
MISFITS = {
    "not json": (envelope("a", body="{not json"), "DecodeError"),
    "not utf-8": (envelope("b", body=b"\x80abc\x95"), "DecodeError"),
    "nothing": (envelope("c", body=""), "payload: tuple_type"),
    "too little": (envelope("d", body="[1]"), "payload: list_type"),
    "a number": (envelope("e", body="7"), "payload: tuple_type"),
    "of an old protocol": (
        envelope("s", body='{"task": "x", "args": [], "kwargs": {}}'),
        "payload: tuple_type",
    ),
    "a format we do not read": (
        envelope("f", **{"content-type": "application/x-python-serialize"}),
        "ContentDisallowed",
    ),
    "a format that is none": (envelope("g", **{"content-type": ["x"]}), "TypeError"),
    "an encoding that is none": (envelope("h", **{"content-encoding": 5}), "AttributeError"),
    "compressed by nothing": (envelope("i", headers={"compression": "none"}), "KeyError"),
    "without an id": (envelope("j", headers={"id": None}), "id: missing"),
    "no task of ours": (envelope("k", headers={"task": "a.stranger"}), "no task of ours"),
    "a task of celery's own": (envelope("t", headers={"task": "celery.map"}), "no task of ours"),
    "a task of another kind": (envelope("l", headers={"task": ["x"]}), "task: string_type"),
    "at no time": (envelope("m", headers={"eta": "soon"}), "eta: none_required"),
    "at a time of another kind": (envelope("u", headers={"eta": 0}), "eta: none_required"),
    "arguments in another kind of words": (envelope("v", headers={"argsrepr": {}}), "argsrepr: string_type"),
    "arguments that are none": (envelope("o", body='["x", {}, {}]'), "payload: list_type"),
    "keywords that are none": (envelope("p", body='[["x"], 5, {}]'), "payload: dict_type"),
    "options that are none": (envelope("q", body='[["x"], {}, 7]'), "payload: dict_type"),
    "a fence that is none": (envelope("w", headers={"fence": "x"}), "fence: int_type"),
    "a fence that is a flag": (envelope("x", headers={"fence": True}), "fence: int_type"),
    "a tick that is none": (envelope("y", headers={"fence": 5, "tick": "soon"}), "tick: int_type"),
    "a series that is none": (envelope("z", headers={"fence": 5, "tick": 7, "tick_of": ["x"]}), "tick_of: string_type"),
    "without options": (envelope("r", body='[["x"], {}, null]'), "payload: dict_type"),
}
ODD_HEADERS = {"timelimit": "x", "retries": {}, "group": [], "stamps": 7, "get": 1, "update": None, "shadow": ["x"]}


def logged_kinds(worker: GuardedProcess) -> list[str]:
    """The lines of a worker's log that tell of an unreadable message."""
    return [line for line in worker.log.read_text(errors="replace").splitlines() if "message_unreadable" in line]


def test_what_is_no_message_is_counted_and_logged_by_kind_and_the_worker_lives(redis_client, sender, start_worker):
    for queue in (INSTANCE, GROUP, TYPE):
        for value in GARBAGE:
            redis_client.lpush(queue, value)
    sender(TYPE, "good")
    worker = start_worker()
    eventually(lambda: order(redis_client) == ["good"], 60, "the message behind the garbage")
    # A queue that has waited for long is asked before others: the good one may come before the last of the garbage.
    eventually(lambda: unreadable(redis_client) == 3 * len(GARBAGE), 30, "the count")
    assert 5 <= len(logged_kinds(worker)) <= len(GARBAGE)
    eventually(lambda: not redis_client.exists("unacked"), 30, "acknowledgements")
    assert worker.running


def test_a_broadcast_that_is_none_ends_no_worker(redis_server, redis_client, sender, start_worker):
    """Each of these would end all workers that hear it, which is all there are: by remote control, and as an event,
    which any program that uses Celery may send here."""
    worker = start_worker("threads")
    sender(TYPE, "before")
    eventually(lambda: order(redis_client) == ["before"], 60, "the message before")
    channels = (f"{control_exchange('cue', None)}.pidbox", "celeryev/worker.heartbeat")
    of_others = (envelope(body="{not json"), envelope(**{"content-type": "application/x-python-serialize"}))
    for value in ("[]", '"text"', "{}", "[" * 100_000, "no json", '{"properties": {}}', envelope(None), *of_others):
        for channel in (f"/{urlsplit(redis_server.url).path.strip('/') or 0}.{name}" for name in channels):
            eventually(lambda told=(channel, value): redis_client.publish(*told), 60, "a worker that hears it")
    for tag in ("after", "and after that"):  # what was heard before the first is looked at before the second
        sender(TYPE, tag)
        eventually(lambda tag=tag: not worker.running or tag in order(redis_client), 60, "the message after")
        assert worker.running


EMBEDS = {
    "a chain of no signature": {"chain": [5]},
    "a chain of an unknown task": {"chain": [{"task": 7, "args": 3}]},
    "a chain that is no list": {"chain": {"task": TASK}},
    "a chord of none": {"chord": "x"},
    "callbacks that are none": {"callbacks": [None]},
    "errbacks that are none": {"errbacks": ["x", 3]},
    "an option of another kind": {"get": 1, "delivery_info": None},
}


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_malformed_signatures_in_a_message_take_no_slot_of_a_worker(redis_client, sender, start_worker, pool):
    """Five times as many as there are slots: each that is kept would leave the worker deaf to the good one."""
    for number in range(5 * 4):
        for name, embed in EMBEDS.items():
            body = json.dumps([["never"], {}, embed])
            message = envelope(f"{name} {number}", body=body, headers={"task": LATE_TASK})
            redis_client.lpush(f"{GROUP}:prio:1", message)
    sender(GROUP, "good")
    worker = start_worker(pool, OPENCUE_SCHED_QUEUE__WORKER_THREADS="4")
    eventually(lambda: "good" in order(redis_client), 60, "the message behind the malformed ones")
    eventually(lambda: not redis_client.exists("unacked"), 30, "acknowledgements")
    assert order(redis_client) == ["good"]
    assert worker.running


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_message_that_is_no_task_is_counted_and_logged_once_by_kind(redis_client, sender, start_worker, pool):
    """More misfits than there are threads pass the transport: slots that are not given back would stop a worker."""
    for message, _ in [*MISFITS.values(), *MISFITS.values()]:
        redis_client.lpush(f"{GROUP}:prio:1", message)
    sender(GROUP, "good")
    worker = start_worker(pool=pool)
    eventually(lambda: order(redis_client) == ["good"], 60, "the message behind the misfits")
    eventually(lambda: unreadable(redis_client) == 2 * len(MISFITS), 30, "the count")
    kinds = [line.partition("kind=")[2].partition(" message=")[0] for line in logged_kinds(worker)]
    for name, (_, words) in MISFITS.items():
        assert any(words in kind for kind in kinds), name
    assert [kind for kind in kinds if not any(words in kind for _, words in MISFITS.values())] == []
    assert len(kinds) == len(set(kinds)) < len(MISFITS)
    eventually(lambda: not redis_client.exists("unacked"), 30, "acknowledgements")
    assert order(redis_client) == ["good"]
    assert worker.running


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_headers_that_are_not_ours_change_nothing(redis_client, sender, start_worker, pool):
    """Celery reads each of these without looking at its kind."""
    for name, value in ODD_HEADERS.items():
        for task in (TASK, LATE_TASK):
            body = json.dumps([[name], {}, {"chain": None}])
            message = envelope(f"{task} {name}", headers={"task": task, name: value}, body=body)
            redis_client.lpush(f"{GROUP}:prio:1", message)
    sender(GROUP, "good")
    start_worker(pool, OPENCUE_SCHED_QUEUE__WORKER_THREADS="2")
    eventually(lambda: sorted(order(redis_client)) == sorted([*ODD_HEADERS, *ODD_HEADERS, "good"]), 60, "all messages")
    eventually(lambda: not redis_client.exists("unacked"), 30, "acknowledgements")


def test_a_periodic_message_takes_the_place_of_the_one_before_it_that_waits(redis_client, redis_server):
    """A day of sweeps while no worker lives, of two series on one queue."""
    broker = broker_settings(redis_server.url)
    app = Celery("beat", broker=broker.url, set_as_current=False)
    app.conf.update(
        broker_transport_options={"priority_steps": [0, 1, 2], "sep": ":prio:"},
        task_default_priority=1,
    )

    def tick(number: int, series: str) -> None:
        headers = {"tick": number, "tick_of": series, "fence": 1}
        app.send_task(TASK, args=(f"{series} {number}",), queue=Queue(TYPE), declare=[], priority=1, headers=headers)

    # given 100 ticks that nobody takes
    for number in range(100):
        tick(number, "sweep@2")
        tick(number, "reap@30")
    # then the last of each waits, and what a former leader sends late takes no place from it
    tick(98, "sweep@2")
    waiting = [json.loads(text)["headers"] for text in redis_client.lrange(f"{TYPE}:prio:1", 0, -1)]
    assert sorted((headers["tick_of"], headers["tick"]) for headers in waiting) == [
        ("reap@30", 99),
        ("sweep@2", 98),
        ("sweep@2", 99),
    ]
    app.close()
