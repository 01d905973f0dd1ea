"""Jobs as they are posted to a board, and as those who look find them."""

from __future__ import annotations

import threading
import time
from datetime import UTC, datetime, timedelta

import pytest

from opencue_sched.coordination.board import PAGE, JobPriority
from opencue_sched.coordination.jobboard import Job, JobBoard, JobFailure, JobState, LogBook, fetch
from tests.kit.polling import eventually


def test_a_job_that_is_done_before_its_poster_looks_was_posted_all_the_same(redis_client, proxy, proxied):
    # given a server that knows the script, and a poster whom the answer reaches late
    with JobBoard(redis_client, "cue") as board, JobBoard(proxied, "cue") as slow:
        board.consume(board.claim(board.post("first"), "me"), "me")
        posted: list[Job] = []
        details = {"shot": "sh10"}
        poster = threading.Thread(
            target=lambda: posted.append(slow.post("render", details=details, priority=JobPriority.HIGH))
        )
        proxy.hold("EVALSHA", answer=True)
        poster.start()

        # when another has done the job by then
        board.consume(eventually(lambda: board.claim_next("a quick one")), "a quick one")
        proxy.let_go()
        poster.join()

        # then the poster has it all the same
        (job,) = posted
        assert (job.name, job.details, job.priority) == ("render", details, JobPriority.HIGH)
        assert job.state == JobState.COMPLETE


def test_an_empty_board_has_no_jobs(board):
    assert list(board.iterjobs()) == []
    assert board.job_count == 0
    assert board.claim_next("me") is None


def test_a_posted_job_has_the_attributes_of_its_posting(board):
    before = time.time()
    book = LogBook("film", "book-uuid", {"store": {"a": 1, "c": 3}})
    posted = board.post("render", book, {"shot": "sh10", "store": {"a": 2, "b": 1}}, "high")
    (job,) = board.iterjobs()
    assert (job.uuid, job.name, job.details["shot"]) == (posted.uuid, "render", "sh10")
    assert {posted, job} == {board.find(job.uuid)} != {board.post("another")}
    assert job.priority is JobPriority.HIGH
    assert (job.book, job.book_uuid, job.book_name) == (book, "book-uuid", "film")
    assert job.store == {"a": 2, "b": 1, "c": 3}
    assert job.board is board
    assert job.state is JobState.UNCLAIMED
    assert job.created_on.tzinfo is UTC
    assert before - 0.001 <= job.created_on.timestamp() <= time.time()
    assert job.last_modified is None, "before its first claim, as on TaskFlow's Redis board"
    assert job.sequence > 0


def test_a_job_without_a_book_has_none(board):
    job = board.post("render")
    assert (job.book, job.book_uuid, job.book_name, job.details, job.store) == (None, None, None, {}, {})


def test_a_boards_persistence_is_a_backend_with_connections(redis_server):
    """As in the reference: ``fetch(..., persistence=backend)``, a book per connection, and the connection closed."""
    loaded, closed = LogBook("film", "u1", {"fresh": True}), []

    class Connection:
        def get_logbook(self, uuid):
            return {"u1": loaded}[uuid]

        def close(self):
            closed.append(self)

    class Backend:
        def get_connection(self):
            return Connection()

    conf = {"board": "redis", "url": redis_server.url, "namespace": "cue"}
    with fetch("films", conf, persistence=Backend()) as board:
        assert board.post("render", LogBook("film", "u1")).book is loaded
        assert board.post("render").book is None
    assert len(closed) == 1


@pytest.mark.parametrize(("text", "priority"), [("very_low", "VERY_LOW"), ("Normal", "NORMAL"), ("HIGH", "HIGH")])
def test_priorities_are_named_in_any_case(board, text, priority):
    assert board.post("render", priority=text).priority.value == priority


def test_a_bad_priority_is_a_value_error_and_nothing_is_posted(board):
    with pytest.raises(ValueError, match="VERY_HIGH"):
        board.post("render", priority="urgent")
    assert board.job_count == 0


@pytest.mark.parametrize("details", [{"x": object()}, {"x": {1, 2}}, {"x": float("nan")}])
def test_details_that_cannot_be_written_are_a_job_failure_and_nothing_is_posted(board, details):
    with pytest.raises(JobFailure, match="render"):
        board.post("render", details=details)
    assert board.job_count == 0


def test_posting_twice_under_one_key_posts_once(board):
    first = board.post("render", details={"n": 1}, key="frame-1")
    second = board.post("render", details={"n": 2}, key="frame-1")
    assert second.uuid == first.uuid
    assert second.details == {"n": 1}
    assert board.job_count == 1
    board.consume(board.claim(first, "me"), "me")
    assert board.post("render", key="frame-1").uuid != first.uuid


def test_iteration_is_by_priority_and_then_age_over_pages(board):
    expected = {}
    for number in range(PAGE + 20):
        priority = list(JobPriority)[number % 5]
        expected.setdefault(priority, []).append(board.post(f"job-{number}", priority=priority).uuid)
    in_order = [uuid for priority in JobPriority for uuid in expected[priority]]
    assert [job.uuid for job in board.iterjobs()] == in_order
    assert [job.uuid for job in board.iterjobs(only_unclaimed=True)] == in_order


def test_an_iterator_knows_its_board_and_what_it_was_asked_for(board):
    iterator = board.iterjobs(only_unclaimed=True, ensure_fresh=True)
    assert (iterator.board, iterator.only_unclaimed, iterator.ensure_fresh) == (board, True, True)


def test_only_unclaimed_is_checked_as_the_iterator_reaches_each_job(board):
    jobs = [board.post(f"job-{number}") for number in range(3)]
    iterator = board.iterjobs(only_unclaimed=True)
    assert next(iterator).uuid == jobs[0].uuid
    board.claim(jobs[1], "somebody")
    assert [job.uuid for job in iterator] == [jobs[2].uuid]
    assert board.job_count == 3
    assert [job.state for job in board.iterjobs()] == [JobState.UNCLAIMED, JobState.CLAIMED, JobState.UNCLAIMED]


def test_ensure_fresh_leaves_out_what_has_gone_meanwhile(board):
    jobs = [board.post(f"job-{number}") for number in range(2)]
    stale, fresh = board.iterjobs(), board.iterjobs(ensure_fresh=True)
    next(stale), next(fresh)
    board.consume(board.claim(jobs[1], "me"), "me")
    assert [job.uuid for job in stale] == [jobs[1].uuid]
    assert list(fresh) == []


def test_times_are_those_of_redis(board):
    def now() -> datetime:
        seconds, micros = board.client.time()
        return datetime.fromtimestamp(seconds + micros / 1e6, UTC)

    before = now()
    created = board.post("render").created_on
    assert created.tzinfo is not None
    assert before - timedelta(milliseconds=1) <= created <= now()
