"""Jobs that are put aside: into the trash by their owner, or because nobody can read them."""

from __future__ import annotations

import pytest
import redis

from opencue_sched.coordination.board import PAGE
from opencue_sched.coordination.jobboard import JobFailure, JobState, NotFound, fetch


def test_trashed_jobs_are_kept_with_the_reason_and_can_be_restored(board):
    job = board.claim(board.post("render", details={"n": 1}), "me")
    board.trash(job, "me", "Traceback: broken")
    assert job.state is JobState.TRASHED
    assert list(board.iterjobs()) == []
    assert [(uuid, fields["error"]) for uuid, fields in board.trashed()] == [(job.uuid, "Traceback: broken")]
    with pytest.raises(NotFound, match="trash"):
        board.claim(board.find(job.uuid), "me")
    restored = board.restore(job.uuid)
    assert restored.details == {"n": 1}
    assert [found.uuid for found in board.iterjobs()] == [job.uuid]
    assert board.claim_next("me").uuid == job.uuid
    with pytest.raises(NotFound):
        board.restore(job.uuid)


def test_all_of_the_trash_is_listed_though_much_of_it_came_in_the_same_moment(board):
    uuids = [board.post(f"job-{number}").uuid for number in range(PAGE + 30)]
    board.call_each("board_update", [(uuid, "trash", "odd", 0, "") for uuid in uuids])
    trash = board.keys.of("trash")
    at = [5] * 10 + [10] * (PAGE + 5) + [20] * 15
    board.client.zadd(trash, dict(zip(uuids, at, strict=True)), xx=True)
    listed = [uuid for uuid, _ in board.trashed()]
    assert sorted(listed) == sorted(uuids)
    assert listed[:10] == sorted(uuids[:10])


def test_trash_goes_for_good_after_its_retention(board):
    kept, old = (board.claim(board.post(name, key=name), "me") for name in ("kept", "old"))
    for job in (kept, old):
        board.trash(job, "me")
    seconds = 1000 * board.client.time()[0]
    board.client.zadd(board.keys.of("trash"), {old.uuid: seconds - 8 * 86_400_000, kept.uuid: seconds - 6 * 86_400_000})
    assert board.post("old", key="old").uuid != old.uuid
    assert [uuid for uuid, _ in board.trashed()] == [kept.uuid]
    assert old.state is JobState.COMPLETE


NESTED = '{"v": 1, "details": ' + "[" * 100_000 + "]" * 100_000 + "}"


@pytest.mark.parametrize("payload", ["", "no json", "[]", '{"v": 99}', '{"v": 1, "details": 3}', NESTED])
def test_poison_is_put_aside_and_iteration_goes_on(board, payload):
    poison, good = board.post("poison"), board.post("good")
    board.client.hset(board.keys.job(poison.uuid), "details", payload)
    assert [job.uuid for job in board.iterjobs()] == [good.uuid]
    ((uuid, fields),) = board.trashed()
    assert uuid == poison.uuid
    assert fields["error"].startswith("unreadable")
    board.client.hset(board.keys.job(good.uuid), "details", payload)
    assert board.claim_next("me") is None
    assert len(list(board.trashed())) == 2


def test_poison_that_is_no_text_is_put_aside_too(redis_server, redis_client):
    with redis.Redis.from_url(redis_server.url) as plain, fetch("poisoned", redis_server.url) as board:
        poison, good = board.post("poison"), board.post("good")
        plain.hset(board.keys.job(poison.uuid), "details", b"\xff")
        assert [job.uuid for job in board.iterjobs()] == [good.uuid]
        assert [uuid for uuid, _ in board.trashed()] == [poison.uuid]


def test_poison_that_is_asked_for_by_name_is_a_job_failure(board):
    """By its key or its id; who posts under that key is not told that the job is there as it should be."""
    poison = board.post("poison", key="one")
    board.client.hset(board.keys.job(poison.uuid), "details", "no json")
    for ask in (lambda: board.post("poison", key="one"), lambda: board.find(poison.uuid)):
        with pytest.raises(JobFailure, match="Invalid JSON"):
            ask()
