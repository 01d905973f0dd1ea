"""The queues through a real Celery worker: order (Q2), age (Q3), and what is no message (Q8)."""

from __future__ import annotations

import base64
import json
import sys
import textwrap
import time
from itertools import count
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import redis
from celery import Celery
from kombu import Queue

from opencue_sched.coordination.broker import broker_settings
from opencue_sched.coordination.dead_letters import read_dead_letters
from opencue_sched.coordination.names import consumed_queues, control_exchange
from opencue_sched.embedded.processes import GuardedProcess
from tests.polling import all_but_one_soon, eventually
from tests.warm_start import WarmProcess

ROOT = Path(__file__).resolve().parents[2]
TASK = "opencue_sched.dispatch.dispatch_cluster"
INSTANCE, GROUP, TYPE = consumed_queues("cue", "dispatch", "default", "one")

# The configuration a real worker has; only the task is another.
RECORDER = """
    import redis
    from celery import Celery
    import celeryconfig
    from opencue_sched.settings import get_settings

    from celery.signals import task_rejected, task_unknown
    from opencue_sched.operate.consumer import bury_unreadable

    celeryconfig.imports = ()
    task_unknown.connect(bury_unreadable)
    task_rejected.connect(bury_unreadable)
    app = Celery("recorder")
    app.config_from_object(celeryconfig)
    client = redis.Redis.from_url(get_settings().redis_dsn)

    @app.task(name="opencue_sched.dispatch.dispatch_cluster")
    def record(tag):
        client.rpush("order", tag)
        if tag == "again":
            from kombu import Queue
            record.apply_async(("again",), queue=Queue("cue:q:work:type:dispatch:group:default:inst:one"), declare=[])

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


def order(client: redis.Redis) -> list[str]:
    return client.lrange("order", 0, -1)


@pytest.mark.parametrize("first_seed", [0, 5, 10, 15])
def test_preloaded_queues_drain_from_the_most_specific_and_first_in_first_out(
    redis_client, sender, start_worker, first_seed
):
    """Q2, over 20 hash seeds; priority 0 before all others."""
    for seed in range(first_seed, first_seed + 5):
        redis_client.flushdb()
        for number in (1, 2):
            for queue, tag in ((TYPE, "type"), (GROUP, "group"), (INSTANCE, "instance")):
                sender(queue, f"{tag}-{number}")
        sender(TYPE, "urgent", priority=0)
        sender(INSTANCE, "idle", priority=2)
        worker = start_worker(PYTHONHASHSEED=str(seed), OPENCUE_SCHED_COORDINATION__QUEUE_AGE="1h")
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
    """Q3: an instance queue that is never empty, and one message each for the group and the type."""
    sender(INSTANCE, "again")
    start_worker(OPENCUE_SCHED_COORDINATION__QUEUE_AGE="500ms")
    eventually(lambda: len(order(redis_client)) > 10, 60, "a busy instance queue")
    number = count()

    def seconds_to_wait() -> float:
        tags = {f"{queue}-{next(number)}" for queue in ("type", "group")}
        for tag in tags:
            sender(TYPE if tag.startswith("type") else GROUP, tag)
        sent_at = time.monotonic()
        eventually(lambda: tags <= set(order(redis_client)), 30, "the others' turn")
        return time.monotonic() - sent_at

    # Twelve queues, of which each is asked first once in 500 ms at most.
    all_but_one_soon(seconds_to_wait, 12 * 0.5 + 1.0)


def test_a_message_waits_for_no_more_others_than_there_are_queues_once_each_is_of_age(
    redis_client, sender, start_worker
):
    """Q3, counted: when every queue is of age at once, each is asked first in its turn, however busy one of them is."""
    sender(INSTANCE, "again")
    start_worker(OPENCUE_SCHED_COORDINATION__QUEUE_AGE="1ms")
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

# What kombu takes for one, and Celery cannot make a task of: body as it is told of, and words of the reason.
MISFITS = {
    "not json": (envelope("a", body="{not json"), "{not json", "Expecting property name"),
    "not utf-8": (envelope("b", body=b"\x80abc\x95"), r"\x80abc\x95", ""),
    "nothing": (envelope("c", body=""), "", ""),
    "too little": (envelope("d", body="[1]"), "[1]", "unpack"),
    "a number": (envelope("e", body="7"), "7", ""),
    "a format we do not read": (
        envelope("f", **{"content-type": "application/x-python-serialize"}),
        BODY,
        "untrusted",
    ),
    "a format that is none": (envelope("g", **{"content-type": ["x"]}), BODY, ""),
    "an encoding that is none": (envelope("h", **{"content-encoding": 5}), BODY, ""),
    "compressed by nothing": (envelope("i", headers={"compression": "none"}), BODY, ""),
    "without an id": (envelope("j", headers={"id": None}), BODY, ""),
    "no task of ours": (envelope("k", headers={"task": "a.stranger"}), BODY, "a.stranger"),
    "a task of another kind": (envelope("l", headers={"task": ["x"]}), BODY, ""),
    "at no time": (envelope("m", headers={"eta": "soon"}), BODY, "soon"),
    "arguments that are none": (envelope("o", body='["x", {}, {}]'), '["x", {}, {}]', "arguments"),
    "keywords that are none": (envelope("p", body='[["x"], 5, {}]'), '[["x"], 5, {}]', "keywords"),
    "options that are none": (envelope("q", body='[["x"], {}, 7]'), '[["x"], {}, 7]', "options"),
    "without options": (envelope("r", body='[["x"], {}, null]'), '[["x"], {}, null]', "options"),
    "no text": (envelope("n", body="\ud800", properties={"body_encoding": None}), r"\ud800", "surrogates"),
}


def test_what_is_no_message_goes_to_the_dead_letters_and_the_worker_lives(redis_client, sender, start_worker):
    """Q8."""
    for queue in (INSTANCE, GROUP, TYPE):
        for value in GARBAGE:
            redis_client.lpush(queue, value)
    sender(TYPE, "good")
    worker = start_worker()
    eventually(lambda: order(redis_client) == ["good"], 60, "the message behind the garbage")
    # A queue that has waited for long is asked before others: the good one may come before the last of the garbage.
    eventually(lambda: len(read_dead_letters(redis_client, "cue")) == 3 * len(GARBAGE), 30, "the dead letters")
    letters = read_dead_letters(redis_client, "cue")
    assert sorted(letter.body for letter in letters) == sorted(GARBAGE * 3)
    assert {letter.queue for letter in letters} == {INSTANCE, GROUP, TYPE}
    assert all(letter.reason for letter in letters)
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


@pytest.mark.parametrize("pool", ["solo", "threads"])
def test_a_message_that_is_no_task_is_told_of_with_body_reason_time_and_queue(redis_client, sender, start_worker, pool):
    """Q8, past the transport: kombu's decode errors, and what Celery refuses or stumbles over. More than there are
    threads, so what is not given back for one would stop the worker."""
    for message, _, _ in MISFITS.values():
        redis_client.lpush(f"{GROUP}:prio:1", message)
    sender(GROUP, "good")
    began = time.time()
    worker = start_worker(pool=pool)
    eventually(lambda: order(redis_client) == ["good"], 60, "the message behind the misfits")
    letters = eventually(
        lambda: len(found := read_dead_letters(redis_client, "cue")) >= len(MISFITS) and found, 30, "the dead letters"
    )
    for letter, (name, (_, body, words)) in zip(reversed(letters), MISFITS.items(), strict=True):
        assert letter.body == body, name
        assert letter.reason and words in letter.reason, name
        assert letter.queue == f"{GROUP}:prio:1", name
        assert began - 1 <= letter.at <= time.time() + 1, name
    eventually(lambda: not redis_client.exists("unacked"), 30, "acknowledgements")
    assert order(redis_client) == ["good"]
    assert worker.running
