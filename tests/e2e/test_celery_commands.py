"""What a studio types: celery worker, beat, flower and inspect, from a checkout; and what these processes survive."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from sqlalchemy import Engine, create_engine, text

from benchmarks import warm_start
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec, ShowIds
from opencue_sched.embedded.servers.fleet import Fleet
from opencue_sched.embedded.servers.processes import free_port
from opencue_sched.embedded.servers.services import EmbeddedRedis
from opencue_sched.settings import Settings
from tests.kit.brief_fleet import brief_fleet
from tests.kit.polling import eventually, tail_of

ROOT = Path(__file__).resolve().parents[2]


def scrape(port: int) -> dict[str, float]:
    """/metrics of a process, by sample name with labels."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return {name: float(value) for name, _, value in (line.rpartition(" ") for line in lines if line[:1] != "#")}


@dataclass
class Site:
    fleet: Fleet
    engine: Engine
    client: redis.Redis
    settings: Settings
    port: int
    show: ShowIds
    numbers: Iterator[int]

    def log(self, name: str) -> str:
        return self.fleet.log(name).read_text(errors="replace")

    def events(self, name: str, event: str) -> list[dict[str, Any]]:
        """The lines of a process's log that tell of ``event``."""
        lines = [line for line in self.log(name).splitlines() if line.startswith("{") and f'"event": "{event}"' in line]
        return [json.loads(line) for line in lines]

    def job(self, frames: int, show: ShowIds | None = None) -> str:
        """A job there is room for."""
        name = f"job{next(self.numbers)}"
        with self.engine.begin() as connection:
            return Farm(connection).job([LayerSpec(frames=frames)], show=show or self.show, name=name).id

    def booked(self, job_id: str) -> int:
        with self.engine.connect() as connection:
            query = text("SELECT count(*) FROM proc WHERE pk_job = :job")
            return int(connection.execute(query, {"job": job_id}).scalar_one())

    def books(self, frames: int = 2) -> None:
        """A job that arrives now is booked."""
        job = self.job(frames)
        eventually(lambda: self.booked(job) == frames, 60, f"{frames} booked frames")

    def metrics_port(self, name: str) -> int:
        (line,) = self.events(name, "metrics_served")
        return urlsplit(line["address"]).port or 0


@contextmanager
def site_on(postgres_server, template_database, directory: Path) -> Iterator[Site]:
    name = f"opencue_sched_commands_{os.getpid()}_{directory.name}".lower()[:60]
    url = postgres_server.create(name, template_database)
    engine = create_engine(url)
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(cores=500, memory_gb=2000, hostname_tag=False)
        show = farm.default_show()
    port = free_port()
    with EmbeddedRedis() as server:
        environment = {
            "OPENCUE_SCHED_DATABASE_URL": url,
            "OPENCUE_SCHED_REDIS_URL": server.url,
            "OPENCUE_SCHED_RQD__DRY_RUN_MODE": "true",
            "OPENCUE_SCHED_QUEUE__METRICS_PORT": str(port),
            "OPENCUE_SCHED_HOST_CACHE__HOST_STALENESS_THRESHOLD": "1h",
            "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "1",
        }
        settings = Settings(database_url=url, redis_url=server.url)
        client = redis.Redis.from_url(server.url, decode_responses=True, socket_timeout=10.0)
        with brief_fleet(environment, directory) as fleet:
            yield Site(fleet, engine, client, settings, port, show, count())
        client.close()
    engine.dispose()
    postgres_server.drop(name)


@pytest.fixture(scope="module")
def site(postgres_server, template_database, tmp_path_factory) -> Iterator[Site]:
    """A fleet with one worker of the default pool, and a beat."""
    with site_on(postgres_server, template_database, tmp_path_factory.mktemp("threads")) as made:
        made.fleet.worker("one")
        made.fleet.beat()
        yield made


def start(site: Site, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    """``celery -A opencue_sched ...`` typed in the checkout."""
    variables = {key: value for key, value in site.fleet.environment.items() if key != "PYTHONPATH"}
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("celery")), "-A", "opencue_sched", *arguments],
        cwd=ROOT,
        env={**variables, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_worker_books_what_arrives_and_its_metrics_move(site):
    with site.engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("counted", managed=True)
        farm.subscription(show, farm.default_alloc(), burst=1000)
    port = site.metrics_port("one")
    before = scrape(port)
    site.job(3, show)
    eventually(lambda: dispatched(scrape(port)).get("counted") == 3, 60, "its frames counted")
    ended = 'scheduler_pass_terminated_reason_total{reason="booked"}'
    eventually(lambda: scrape(port).get(ended, 0) > before.get(ended, 0), 60, "a pass counted")
    after = scrape(port)
    assert after["scheduler_store_ready"] == 1
    assert after["scheduler_jobs_queried_total"] > before["scheduler_jobs_queried_total"]
    assert after["scheduler_time_to_book_seconds_count"] >= before["scheduler_time_to_book_seconds_count"] + 3


def dispatched(samples: dict[str, float]) -> dict[str, float]:
    """Frames dispatched, by show."""
    counter = 'scheduler_frames_dispatched_total{show_name="'
    return {name[len(counter) : -2]: value for name, value in samples.items() if name.startswith(counter)}


def test_a_worker_answers_inspect_from_the_checkout(site):
    # It waits for as many answers as it names destinations; for one without any, until its time-out.
    ran = start(site, "inspect", "--timeout", "60", "--destination", "one@localhost", "ping", "--json")
    out, errors = ran.communicate(timeout=120)
    assert ran.returncode == 0, errors
    assert json.loads(out) == {"one@localhost": {"ok": "pong"}}


def test_a_second_worker_of_the_machine_serves_the_next_port(site):
    site.fleet.worker("two")
    try:
        ports = site.metrics_port("one"), site.metrics_port("two")
        assert ports[0] == site.port
        assert ports[1] > site.port
        assert site.events("two", "metrics_served")[0]["wanted_port"] == site.port
        site.books(4)
        with site.engine.connect() as connection:
            procs = connection.execute(text("SELECT count(*) FROM proc")).scalar_one()
        eventually(lambda: sum(sum(dispatched(scrape(port)).values()) for port in ports) == procs, 60, "both counted")
    finally:
        site.fleet.stop("two")


def test_usr1_toggles_debug_and_usr2_debug_with_sql_on_a_worker_that_goes_on(site):
    worker = site.fleet.processes["one"]

    def log_of_a_booking_after(number: int) -> str:
        told = len(site.events("one", "log_level_changed"))
        worker.send_signal(number)
        eventually(
            lambda: len(site.events("one", "log_level_changed")) > told, 60, "another level", told=tail_of(worker.log)
        )
        site.books(1)  # what a pass that was under way still said is before this
        began = len(site.log("one"))
        for _ in range(2):  # the pass that booked the first has ended, and said so, when the second is booked
            site.books(1)
        return site.log("one")[began:]

    debug = log_of_a_booking_after(signal.SIGUSR1)
    assert '"level": "debug"' in debug
    assert "SELECT" not in debug
    assert '"level": "debug"' not in log_of_a_booking_after(signal.SIGUSR1)
    assert "FOR NO KEY UPDATE" in log_of_a_booking_after(signal.SIGUSR2)
    quiet = log_of_a_booking_after(signal.SIGUSR2)
    assert "SELECT" not in quiet
    assert '"level": "debug"' not in quiet
    # Celery's own use of SIGUSR1, a dump of every thread's stack, is still made.
    assert "MainThread" in site.log("one")


def send_raw(site: Site, queue: str, body: object, *, task: str, content_type: str = "application/json") -> None:
    """A well-formed envelope around any body."""
    encoded = body if isinstance(body, bytes) else json.dumps(body).encode()
    number = next(site.numbers)
    message = {
        "body": base64.b64encode(encoded).decode(),
        "content-encoding": "utf-8",
        "content-type": content_type,
        "headers": {"lang": "py", "task": task, "id": f"00000000-0000-0000-0000-{number:012}", "argsrepr": ""},
        "properties": {
            "correlation_id": f"{number}",
            "delivery_mode": 2,
            "delivery_info": {"exchange": "", "routing_key": queue},
            "priority": 1,
            "body_encoding": "base64",
            "delivery_tag": f"tag-{number}",
        },
    }
    site.client.lpush(queue, json.dumps(message))


DISPATCH = "opencue_sched.dispatch.dispatch_cluster"
SWEEP = "opencue_sched.sweep.sweep_clusters"
NO_POSTING = "0" * 40


@pytest.mark.parametrize(
    ("task", "body"),
    [
        (DISPATCH, b"{not json"),
        (DISPATCH, b"\x80\x04\x95"),
        (DISPATCH, {"args": []}),
        (DISPATCH, [[], {}, {}]),
        (DISPATCH, [["one", "two", "three", "four"], {}, {}]),
        (DISPATCH, [[None], {}, {}]),
        (DISPATCH, [["'; DROP TABLE proc; --"], {}, {}]),
        (DISPATCH, [[NO_POSTING], {"ticket": "none"}, {}]),
        (DISPATCH, [[NO_POSTING], {"surprise": 1}, {}]),
        (SWEEP, [[17], {}, {}]),
        (SWEEP, [[[{"a": 1}]], {}, {}]),
        ("opencue_sched.dispatch.no_such_task", [[], {}, {}]),
        ("os.system", [["true"], {}, {}]),
        ("", [[], {}, {}]),
    ],
)
def test_a_malformed_message_harms_nothing(site, task, body):
    send_raw(site, "cue:q:work:type:dispatch", body, task=task)
    eventually(lambda: not site.client.exists("cue:q:work:type:dispatch"), 60, "the message taken")
    site.books(1)
    assert site.fleet.processes["one"].running


def test_what_is_no_task_of_ours_is_dropped_and_other_formats_than_json_are_never_read(site):
    port = site.metrics_port("one")
    before = scrape(port)["scheduler_messages_unreadable_total"]
    send_raw(site, "cue:q:work:type:dispatch", [[], {}, {}], task="a.stranger")
    marker = Path(f"/tmp/opencue-sched-{os.getpid()}-pickle-ran")  # noqa: S108 - must not appear
    pickled = b"cos\nsystem\n(S'touch " + str(marker).encode() + b"'\ntR."
    send_raw(site, "cue:q:work:type:dispatch", pickled, task=DISPATCH, content_type="application/x-python-serialize")
    eventually(lambda: scrape(port)["scheduler_messages_unreadable_total"] == before + 2, 60, "both counted")
    site.books(1)
    assert not marker.exists()
    # Each kind is told of once, with the message that was the first of it.
    assert "no task of ours" in {line["kind"] for line in site.events("one", "message_unreadable")}


def get(port: int, path: str, *, password: str = "") -> tuple[int, str]:
    """Status and body of a page of Flower; 0 while it does not listen."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}")
    if password:
        request.add_header("Authorization", f"Basic {base64.b64encode(password.encode()).decode()}")
    try:
        with urllib.request.urlopen(request, timeout=10) as answer:  # noqa: S310 - a fixed scheme
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as refused:
        with refused:
            return refused.code, ""
    except OSError:
        return 0, ""


def test_flower_shows_its_pages_and_metrics_and_asks_for_a_password_off_loopback(site):
    port, open_port = free_port(), free_port()
    site.fleet.flower(port)
    guarded = start(site, "flower", "--address=0.0.0.0", f"--port={open_port}", FLOWER_BASIC_AUTH="artist:secret")
    try:
        log = site.fleet.log("flower")
        eventually(lambda: get(port, "/")[0] == 200, 60, "Flower's page", told=tail_of(log))
        eventually(
            lambda: "one@localhost" in get(port, "/workers?refresh=1")[1], 60, "the worker's line", told=tail_of(log)
        )
        eventually(lambda: get(open_port, "/")[0] == 401, 60, "the question for a password")
        assert get(open_port, "/workers", password="artist:wrong")[0] == 401
        # Events are on: nothing else tells Flower of a task. What came before it listened, it never hears of.
        tasks = "/api/tasks?limit=5&taskname=opencue_sched.dispatch.dispatch_cluster"

        def sees_the_end_of_a_task() -> bool:
            site.books(1)
            return "SUCCESS" in get(open_port, tasks, password="artist:secret")[1]

        eventually(sees_the_end_of_a_task, 60, "a task's end")
        for page, shows in {
            "/": "one@localhost",
            "/workers": "one@localhost",
            "/tasks": "tasks-table",
            "/broker": "<td>cue:q:work:type:dispatch:group:default</td>",
            "/metrics": "flower_events_total",
            "/worker/one@localhost": "opencue_sched.sweep.sweep_clusters",
        }.items():
            # What a page shows of a worker, Flower asks the worker for first.
            eventually(
                lambda page=page, shows=shows: shows in get(port, page)[1],
                60,
                page,
                told=lambda page=page: get(port, page)[1][-3500:],
            )
    finally:
        site.fleet.stop("flower")
        guarded.terminate()
        guarded.communicate(timeout=100)


def test_what_cannot_work_says_why_and_ends(site, tmp_path):
    """One of each program is started as a user types it, the others without the time they take to load."""
    opened = tmp_path / "flowerconfig.py"
    opened.write_text("address = '0.0.0.0'\n")
    solo = ("worker", "-P", "solo")
    url, broker, facility = "OPENCUE_SCHED_DATABASE_URL", "OPENCUE_SCHED_REDIS_URL", "OPENCUE_SCHED_SCHEDULER__FACILITY"
    threads, level = "OPENCUE_SCHED_QUEUE__WORKER_THREADS", "OPENCUE_SCHED_LOGGING__LEVEL"
    expected = {
        (*solo, url, "postgresql://u:secret@127.0.0.1:1/x"): (75, url),
        (*solo, broker, "redis://:secret@127.0.0.1:1/0"): (75, broker),
        ("worker", "--autoscale", "8,2", level, "info"): (78, "--autoscale"),
        (*solo, facility, "nowhere"): (78, "'nowhere'"),
        ("beat", broker, "sentinel://:secret@127.0.0.1:1"): (78, broker),
        ("beat", threads, "many"): (78, threads),
        ("beat", "OPENCUE_SCHED_INSTANCE", "render 01"): (78, "OPENCUE_SCHED_INSTANCE"),
        ("beat", level, "loud"): (78, level),
        ("flower", "--address=0.0.0.0", "FLOWER_BASIC_AUTH", ""): (78, "FLOWER_BASIC_AUTH"),
        ("flower", "--address=", "FLOWER_PORT", "0"): (78, "FLOWER_BASIC_AUTH"),
        ("flower", f"--conf={opened}", "FLOWER_PORT", "0"): (78, " 0.0.0.0 "),
    }
    quiet = {"OPENCUE_SCHED_QUEUE__METRICS_PORT": "0"}
    first = {case[0]: case for case in reversed(expected)}
    typed = {case: start(site, *case[:-2], **quiet, **{case[-2]: case[-1]}) for case in first.values()}
    for case, (status, said) in expected.items():
        if case in typed:
            _, errors = typed[case].communicate(timeout=240)
            returned = typed[case].returncode
        else:
            command = [sys.executable, "-m", "celery", "-A", "opencue_sched", *case[:-2]]
            ran = warm_start.run(command, env={**site.fleet.environment, **quiet, case[-2]: case[-1]}, cwd=tmp_path)
            errors, returned = ran.stderr, ran.returncode
        (line,) = [line for line in errors.splitlines() if line.startswith("opencue-sched ")] or [errors]
        assert said in line
        assert returned == status, errors
        assert "secret" not in errors
