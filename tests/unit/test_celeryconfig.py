"""What Celery is told: tasks by explicit names, each on the queue of its type, as JSON, when the settings say."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import socket
import subprocess
import sys
from importlib.metadata import entry_points
from itertools import count
from pathlib import Path

import pytest
from kombu import Connection, Queue

import celeryconfig
from opencue_sched.beat import LeaderScheduler
from opencue_sched.celery import app
from opencue_sched.clients.postgres import STATEMENT_SECONDS
from opencue_sched.coordination.keys import QueueType, common_queue, consumed_queues, type_of
from opencue_sched.reports.reaper import REAP_SECONDS
from opencue_sched.settings import Rqd, get_settings
from tasks.maintenance import REAP_LEASE_SECONDS
from tests.kit.environment import variables

TASKS = {
    "opencue_sched.sweep.sweep_clusters",
    "opencue_sched.dispatch.dispatch_cluster",
    "opencue_sched.accounting.recompute",
    "opencue_sched.accounting.reseed_limits",
    "opencue_sched.maintenance.reap",
    "opencue_sched.maintenance.recover_depends",
    "opencue_sched.maintenance.move_finished_jobs",
    "opencue_sched.maintenance.keep_promises",
    "opencue_sched.maintenance.send_events",
}


@pytest.fixture(scope="module", autouse=True)
def tasks_imported() -> None:
    for name in celeryconfig.imports:
        importlib.import_module(name)


def test_every_task_has_the_name_that_others_know_it_by() -> None:
    assert {name for name in app.tasks if not name.startswith("celery.")} == TASKS


@pytest.mark.parametrize("task", sorted(TASKS))
def test_a_task_goes_to_a_queue_of_its_type_that_workers_consume(task: str) -> None:
    queue = app.amqp.router.route({}, task)["queue"]
    name = queue.name if isinstance(queue, Queue) else queue
    assert type_of(name) == task.split(".")[1]
    assert name in {it.name for it in celeryconfig.task_queues}
    assert name in consumed_queues("cue", task.split(".")[1], "any-group", "any-instance")


def test_what_any_worker_of_a_facility_may_do_goes_to_its_group() -> None:
    for group, facility in (("any-group", None), ("alpha", "Alpha")):
        consumed = consumed_queues("cue", "sweep", group, "any-instance")[: 2 if facility else 3]
        assert str(common_queue("cue", "sweep", facility)) == consumed[-1]


def test_every_type_of_queue_has_a_task() -> None:
    assert {task.split(".")[1] for task in TASKS} == {kind.value for kind in QueueType}


def test_nothing_but_json_is_written_or_read() -> None:
    assert app.conf.accept_content == ["json"]
    assert {app.conf.task_serializer, app.conf.result_serializer, app.conf.event_serializer} == {"json"}


def test_a_broker_that_stays_away_is_waited_for_without_end() -> None:
    """Celery gives up after a hundred tries otherwise, and the worker ends."""

    class Enough(Exception):
        pass

    def tried(_error: Exception, _interval: float) -> None:
        if next(tries) > 300:
            raise Enough

    tries = count()
    with socket.create_server(("127.0.0.1", 0)) as reserved:
        address = f"redis://127.0.0.1:{reserved.getsockname()[1]}/0"
    pauses = {"interval_start": 0, "interval_step": 0, "interval_max": 0}
    with Connection(address) as connection, pytest.raises(Enough):
        connection.ensure_connection(tried, app.conf.broker_connection_max_retries, **pauses)


def test_periodic_tasks_exist_and_come_as_often_as_the_settings_say() -> None:
    settings = get_settings()
    seconds = {entry["task"]: entry["schedule"] for entry in celeryconfig.beat_schedule.values()}
    assert seconds == {
        "opencue_sched.sweep.sweep_clusters": settings.queue.active_scan_interval,
        "opencue_sched.accounting.recompute": settings.accounting.recompute_interval_seconds,
        "opencue_sched.accounting.reseed_limits": settings.accounting.limit_reseed_interval_seconds,
        "opencue_sched.maintenance.reap": 30,
        "opencue_sched.maintenance.recover_depends": 60,
        "opencue_sched.maintenance.move_finished_jobs": 600,
        "opencue_sched.maintenance.keep_promises": 15,
        "opencue_sched.maintenance.send_events": 5,
    }


def test_beats_are_ours_by_configuration_and_by_entry_point() -> None:
    (entry,) = entry_points(group="celery.beat_schedulers", name="opencue_sched")
    assert entry.load() is LeaderScheduler
    assert app.conf.beat_scheduler == entry.value


def test_old_queues_are_asked_last_and_shared_ones_never_by_a_fleet_of_a_facility() -> None:
    asked = {}
    for name, given in (
        ("old", {"COORDINATION__LEGACY_QUEUES": '["cue.old"]'}),
        ("alpha", {"SCHEDULER__FACILITY": "Alpha"}),
    ):
        with variables(**given):
            asked[name] = [queue.name for queue in runpy.run_path(celeryconfig.__file__)["task_queues"]]
    assert asked["old"] == [*(queue.name for queue in celeryconfig.task_queues), "cue.old"]
    assert all(":group:alpha" in name for name in asked["alpha"])


def test_threads_of_a_worker_are_the_references_setting() -> None:
    assert app.conf.worker_concurrency == get_settings().queue.worker_threads
    assert app.conf.worker_prefetch_multiplier == 1
    assert app.conf.worker_pool == "threads"


@pytest.mark.parametrize(
    ("stream", "concurrency", "prefetch"),
    [
        ("", 5, 1),
        ("cluster_buffer_size: 3", 3, 1),
        ("job_buffer_size: 2", 5, 2),
        ("cluster_buffer_size: 7, job_buffer_size: 4", 7, 4),
    ],
)
def test_the_references_stream_buffers_are_celerys_concurrency_and_prefetch_where_they_are_set(
    tmp_path: Path, stream: str, concurrency: int, prefetch: int
) -> None:
    (tmp_path / "s.yaml").write_text(f"queue:\n  worker_threads: 5\n  stream: {{{stream}}}\n")
    with variables(CONFIG=str(tmp_path / "s.yaml")):
        made = runpy.run_path(celeryconfig.__file__)
    assert (made["worker_concurrency"], made["worker_prefetch_multiplier"]) == (concurrency, prefetch)


WHAT_IS_LOADED = """
import json, sys
import opencue_sched.beat
from opencue_sched.celery import app
app.loader.import_default_modules()
loaded_late = ("grpc", "opencue_sched.dispatch.cluster_pass", "opencue_sched.worker.process")
print(json.dumps([sorted(app.tasks), sorted(set(loaded_late) & sys.modules.keys())]))
"""


def test_a_beat_knows_the_tasks_without_loading_what_runs_them() -> None:
    ran = subprocess.run(
        [sys.executable, "-c", WHAT_IS_LOADED], capture_output=True, text=True, check=True, timeout=120
    )
    tasks, of_a_beat = json.loads(ran.stdout.splitlines()[-1])
    assert set(tasks) >= TASKS
    assert of_a_beat == []


WHAT_AN_IMPORT_DOES = """
import sys
opened = []
sys.addaudithook(lambda event, given: opened.append(event) if event in ("socket.connect", "signal.signal") else None)
del sys.argv
import opencue_sched.celery
print(opened)
"""


def test_importing_the_application_reads_no_argv_and_opens_nothing(tmp_path: Path) -> None:
    # given a program without a command line, and settings that are not there
    ran = subprocess.run(
        [sys.executable, "-c", WHAT_AN_IMPORT_DOES],
        env={**os.environ, "OPENCUE_SCHED_CONFIG": str(tmp_path / "missing.yaml")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ran.returncode, ran.stdout) == (0, "[]\n"), ran.stderr


@pytest.mark.parametrize(
    ("way", "ours"),
    [
        ("control", {"pause_dispatch", "resume_dispatch", "drain", "stop_worker", "reload_clusters"}),
        ("inspect", {"leader_status", "accounting_audit"}),
    ],
)
def test_celerys_remote_control_has_our_commands_in_a_process_that_loads_nothing_else(way: str, ours: set[str]) -> None:
    told = subprocess.run(
        [sys.executable, "-m", "celery", "-A", "opencue_sched", way, "--list"],
        capture_output=True, text=True, check=True, timeout=60,
    ).stdout  # fmt: skip
    assert ours <= set(re.findall(r"^  (\w+)", told, re.MULTILINE))


def test_a_reap_ends_before_its_message_is_handed_out_again_and_its_turn_before_that() -> None:
    begun = REAP_SECONDS + Rqd().timeout
    longest = begun + 2 * STATEMENT_SECONDS
    assert longest < celeryconfig.broker_transport_options["visibility_timeout"]
    assert begun < REAP_LEASE_SECONDS
    assert celeryconfig.broker_transport_options["visibility_timeout"] > REAP_LEASE_SECONDS


def test_messages_are_delivered_as_the_page_on_coordination_says() -> None:
    page = (Path(celeryconfig.__file__).parent / "docs" / "coordination.md").read_text()
    table = [line.split("|")[1:3] for line in page.split("### Delivery")[1].splitlines() if line.startswith("| ")]
    says = {name.strip(): value.strip() for name, value in table}
    broker = celeryconfig.broker_transport_options
    assert says["visibility time-out"] == f"{broker['visibility_timeout']} s"
    restored = f"{broker['unacked_restore_interval']} s, throttle {broker['unacked_restore_throttle']}"
    assert says["restore interval"] == restored
    assert says["prefetch"].startswith(f"{celeryconfig.worker_prefetch_multiplier} per thread")
    late = {task.split(".")[1] for task in TASKS if app.tasks[task].acks_late}
    early = {task.split(".")[1] for task in TASKS if not app.tasks[task].acks_late}
    assert late.isdisjoint(early)
    assert says["acknowledgement"] == f"early for {' and '.join(sorted(early, reverse=True))}, late for " + (
        " and ".join(sorted(late))
    )
