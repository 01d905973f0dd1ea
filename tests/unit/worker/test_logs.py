"""Logs are text for who looks on at a terminal, and JSON lines for everything else."""

from __future__ import annotations

import io
import json
import logging
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import psycopg2
import pytest
import redis
import structlog
from billiard.exceptions import RestartFreqExceeded
from redis.exceptions import ReadOnlyError
from sqlalchemy.exc import OperationalError

from opencue_sched.settings import Logging
from opencue_sched.worker.logs import configure_logging
from tests.kit.frozen_clock import Clock
from tests.kit.polling import MOST_SECONDS


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _logging_as_it_was():
    root, before = logging.getLogger(), structlog.get_config()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers, root.level = handlers, level
    structlog.configure(**before)


@pytest.mark.parametrize("stream", [Terminal, io.StringIO])
def test_a_terminal_gets_text_and_everything_else_json(monkeypatch, tmp_path, stream):
    monkeypatch.setattr(sys, "stderr", stream())
    configure_logging(Logging(path=tmp_path / "log"))
    logging.getLogger("one").warning("told")
    shown, kept = sys.stderr.getvalue(), (tmp_path / "log").read_text()
    assert json.loads(kept)["event"] == "told"
    assert shown.startswith("{") == (stream is io.StringIO)
    assert "told" in shown


REPLICA = ReadOnlyError("You can't write against a read only replica.")


def lines(log) -> list[dict[str, object]]:
    return [json.loads(line) for line in log.read_text().splitlines()]


@pytest.fixture
def clock() -> Clock:
    return Clock(0.0)


@pytest.fixture
def log(monkeypatch, tmp_path, clock):
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    configure_logging(Logging(path=tmp_path / "log"), clock=clock)
    return tmp_path / "log"


def fail(event: str, error: Exception, **fields: object) -> None:
    """One failure, as our code logs it."""
    try:
        raise error
    except Exception as raised:
        structlog.get_logger("ours").warning(event, error=str(raised), **fields)


def consumer_fails(error: Exception) -> None:
    """As Celery's consumer tells of a broker: the exception is an argument."""
    logging.getLogger("celery.worker.consumer.consumer").error("consumer: Cannot connect to %s: %s.", "redis://", error)


def task_fails(error: Exception) -> None:
    """As Celery tells of a task: with the traceback."""
    try:
        raise error
    except Exception:
        logging.getLogger("celery.app.trace").error("Task sweep raised unexpected: %r", error, exc_info=True)


def test_a_store_in_trouble_is_told_once_a_minute_without_a_traceback(log, clock):
    # given a Redis that is a replica for two minutes, met by a consumer that is restarted and by tasks
    for second in range(120):
        clock.now = second
        for _ in range(4):
            consumer_fails(REPLICA)
            task_fails(REPLICA)
    # then there is one line a minute, which says how many it stands for
    told = lines(log)
    assert [line.get("repeated") for line in told] == [None, 479]
    assert "read only replica" in told[0]["event"]
    assert "Traceback" not in log.read_text()


def test_trouble_that_is_logged_after_it_was_caught_is_told_once_a_minute_as_well(log, clock):
    # given hosts whose reports fail for a minute, each logged where its error is no longer being handled
    error = OperationalError("SELECT 1", {}, psycopg2.OperationalError("the server is starting up"))
    for second in range(61):
        clock.now = second
        structlog.get_logger("ours").warning("host_report_failed", host=f"node{second}", exc_info=error)
    # then the second line is told after a minute, and says how many there were
    told = lines(log)
    assert [(line["host"], line.get("repeated")) for line in told] == [("node0", None), ("node60", 59)]
    assert {line["error"] for line in told} == {"the server is starting up"}
    assert "Traceback" not in log.read_text()


def test_restarts_that_are_too_frequent_are_no_line_beside_their_reason(log, clock):
    consumer_fails(REPLICA)
    error = RestartFreqExceeded("5 in 1s")
    try:
        raise error
    except RestartFreqExceeded:
        consumer = logging.getLogger("celery.worker.consumer.consumer")
        consumer.critical("Frequent restarts detected: %r", error, exc_info=True)
        clock.now = 61
        consumer.critical("Frequent restarts detected: %r", error, exc_info=True)
    told = [(line["event"].partition(":")[0], "exception" in line) for line in lines(log)]
    assert told == [("consumer", False), ("Frequent restarts detected", False)]


def test_other_stores_other_errors_and_other_events_have_lines_of_their_own(log):
    for _ in range(3):
        fail("hosts_not_read", REPLICA)
        fail("hosts_not_read", redis.exceptions.ConnectionError("refused"))
        fail("caps_not_read", REPLICA)
        fail("hosts_not_read", OperationalError("SELECT 1", {}, psycopg2.OperationalError("the server is starting up")))
    told = [(line["event"], line["error"].partition("\n")[0]) for line in lines(log)]
    assert told == [
        ("hosts_not_read", str(REPLICA)),
        ("hosts_not_read", "refused"),
        ("caps_not_read", str(REPLICA)),
        ("hosts_not_read", "(psycopg2.OperationalError) the server is starting up"),
    ]


def test_what_is_no_trouble_of_a_store_is_told_each_time_with_its_traceback(log):
    for _ in range(2):
        task_fails(ValueError("a defect"))
    told = lines(log)
    assert len(told) == 2
    assert all("Traceback" in str(line["exception"]) for line in told)


def test_what_names_a_proc_is_told_each_time(log):
    for proc in ("p1", "p2"):
        fail("commit_outcome_unknown", REPLICA, proc=proc)
    assert [line["proc"] for line in lines(log)] == ["p1", "p2"]


def events(file: Path) -> list[str]:
    return [json.loads(line)["event"] for line in file.read_text().splitlines()]


def test_a_log_file_that_is_renamed_is_begun_anew(tmp_path):
    # given a log file with a line, which logrotate renames
    file, rotated = tmp_path / "log", tmp_path / "log.1"
    configure_logging(Logging(path=file))
    logging.getLogger("one").warning("before")
    file.rename(rotated)
    # when more is logged, then it stands in a new file
    logging.getLogger("one").warning("after")
    assert (events(rotated), events(file)) == (["before"], ["after"])
    # and also after the directory was away for a while, which ends nothing
    tmp_path.rename(tmp_path.with_suffix(".away"))
    logging.getLogger("one").warning("lost")
    tmp_path.with_suffix(".away").rename(tmp_path)
    file.rename(tmp_path / "log.2")
    logging.getLogger("one").warning("again")
    assert events(file) == ["again"]


def test_what_a_full_disk_takes_no_more_is_told_once_a_minute(monkeypatch, tmp_path, clock):
    # given a log file on a disk that is full
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    file = tmp_path / "log"
    file.symlink_to("/dev/full")
    configure_logging(Logging(path=file), clock=clock)
    # when a hundred lines are logged over two minutes
    for _ in range(100):
        logging.getLogger("one").warning("told")
        clock.now += 1.2
    # then standard error has them all, and each minute one more that says how many the file lacks
    told = [json.loads(line) for line in sys.stderr.getvalue().splitlines()]
    lost = [line for line in told if line["event"] == "log_lines_lost"]
    assert len(told) == 100 + len(lost)
    assert [line["lines"] for line in lost] == [1, 50]
    assert {(line["log"], line["error"]) for line in lost} == {(str(file), "No space left on device")}
    # and when there is room again, it is told how many were lost until then
    file.unlink()
    clock.now += 60
    logging.getLogger("one").warning("room")
    assert events(file) == ["room", "log_lines_lost"]
    assert json.loads(file.read_text().splitlines()[1])["lines"] == 49


def test_a_full_disk_under_both_outputs_stops_no_thread(monkeypatch, tmp_path):
    # given standard error and a log file on a disk that is full, and two threads that meet when losses are to be told
    file = tmp_path / "log"
    file.symlink_to("/dev/full")
    meeting = threading.Barrier(2)

    def clock() -> float:
        with suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)
        return time.monotonic()

    with Path("/dev/full").open("w", buffering=1) as full:
        monkeypatch.setattr(sys, "stderr", full)
        configure_logging(Logging(path=file), clock=clock)
        record = logging.LogRecord("one", logging.WARNING, __file__, 1, "lost", None, None)
        # when each loses a line by another of the two
        threads = [
            threading.Thread(target=handler.handle, args=(record,), daemon=True) for handler in logging.root.handlers
        ]
        for thread in threads:
            thread.start()
        # then neither waits for the other for ever
        for thread in threads:
            thread.join(MOST_SECONDS)
        assert [thread.is_alive() for thread in threads] == [False, False]
        monkeypatch.undo()
        with suppress(OSError):
            full.close()
