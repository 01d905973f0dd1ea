"""Listeners are called for posts, claims and removals of jobs, as TaskFlow calls them."""

from __future__ import annotations

import time

import pytest

from opencue_sched.coordination.board import JobPriority
from opencue_sched.coordination.board_events import POSTED, REMOVAL
from opencue_sched.coordination.jobboard import FormerJob, Job, JobState
from tests.kit.polling import eventually


def test_callbacks_hear_of_posts_claims_and_removals(board):
    heard: list[tuple[str, str]] = []

    def hear(kind, details) -> None:
        heard.append((kind, details["job"].uuid))

    for kind in (POSTED, "CLAIMED", REMOVAL):
        board.notifier.register(kind, hear)
    board.notifier.register("POSTED", lambda *_, **__: 1 / 0)
    job = board.claim(board.post("render"), "me")
    board.consume(job, "me")
    eventually(lambda: len(heard) >= 3)
    assert heard == [("POSTED", job.uuid), ("CLAIMED", job.uuid), ("REMOVAL", job.uuid)]
    board.notifier.deregister("POSTED", hear)
    board.claim(board.post("again"), "me")
    eventually(lambda: len(heard) >= 4)
    assert heard[3][0] == "CLAIMED"


def test_callbacks_are_called_as_taskflow_calls_them(board):
    """With what was registered beside them, and the details by their name."""
    heard: list[tuple[str, ...]] = []

    def hear(kind, first, *, last, details) -> None:
        heard.append((kind, first, last, details["name"]))

    board.notifier.register(
        POSTED, hear, args=("a",), kwargs={"last": "z"}, details_filter=lambda details: details["name"] != "other"
    )
    board.notifier.register(POSTED, lambda _, **named: heard.append(tuple(named)))
    board.post("other")
    board.post("wanted")
    eventually(lambda: len(heard) >= 3)
    assert heard == [("details",), ("POSTED", "a", "z", "wanted"), ("details",)]


def test_what_listeners_hear_of_is_a_job_and_so_is_what_was_removed(board):
    """TaskFlow's applications register POSTED and REMOVAL, and work with the job."""
    posted: list[Job] = []
    removed: list[Job | FormerJob] = []
    board.notifier.register(REMOVAL, lambda _, details: removed.append(details["job"]))
    board.notifier.register(POSTED, lambda _, details: posted.append(details["job"]))
    done, bad = board.post("done", details={"shot": "sh10"}), board.post("bad")
    eventually(lambda: len(posted) == 2)
    assert posted == [done, bad]
    assert (posted[0].details["shot"], posted[0].priority) == ("sh10", JobPriority.NORMAL)
    board.consume(board.claim(posted[0], "me"), "me")
    board.trash(board.claim(bad, "me"), "me")
    eventually(lambda: len(removed) == 2)
    assert removed == [done, bad]
    assert [(job.uuid, job.name, job.state) for job in removed] == [
        (done.uuid, "done", JobState.COMPLETE),
        (bad.uuid, "bad", JobState.TRASHED),
    ]
    assert set(removed) == {done, bad}


def test_a_kind_of_event_that_there_is_not_is_refused(board):
    with pytest.raises(ValueError, match=r"REMOVED.*POSTED.*REMOVAL"):
        board.notifier.register("REMOVED", print)


def test_listeners_go_on_when_the_events_so_far_are_gone(board):
    heard: list[str] = []
    board.notifier.register("POSTED", lambda _, details: heard.append(details["name"]))
    board.post("one")
    eventually(lambda: heard == ["one"])
    board.client.delete(board.keys.of("events"))
    time.sleep(0.01)  # ids of events are milliseconds: not in that of the last one
    board.post("two")
    eventually(lambda: heard == ["one", "two"])
