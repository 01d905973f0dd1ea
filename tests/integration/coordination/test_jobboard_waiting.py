"""Waiting for a job to come or to end: a wait ends by an event, or when a delay or a claim is over."""

from __future__ import annotations

import re
import threading

import pytest
import redis

from opencue_sched.coordination.jobboard import JobBoard, NotFound
from tests.kit.polling import MOST_SECONDS, eventually
from tests.kit.redis_log import RedisLog


def test_waiting_for_a_job_ends_when_one_is_posted(board):
    found: list[str] = []
    waiter = threading.Thread(target=lambda: found.extend(job.name for job in board.wait(10)))
    waiter.start()
    board.post("render")
    waiter.join(MOST_SECONDS)
    assert found == ["render"]


def test_waiting_ends_when_a_delayed_job_is_due(board, redis_server):
    """Nobody tells of that moment: who waits looks again then, and not only when it has waited for a second."""
    job = board.post("render", delay=0.5)
    with RedisLog(redis_server.url) as log:
        assert next(board.wait(60)).uuid == job.uuid
        looks = [re.search(r"^XREAD .*BLOCK (\d+) ", call.text) for call in log.since(0)]
    assert [int(look[1]) for look in looks if look is not None and int(look[1]) > 500] == []


def test_waiting_in_vain_is_not_found(board):
    with pytest.raises(NotFound, match=r"'tests'.* 0\.05 s"):
        board.wait(0.05)


def test_waiting_does_not_end_for_claimed_jobs(board):
    job = board.claim(board.post("render"), "me")
    with pytest.raises(NotFound):
        board.wait(0.05)
    board.abandon(job, "me")
    assert next(board.wait(MOST_SECONDS)).uuid == job.uuid


def test_waiting_ends_when_a_claim_runs_out(board):
    job = board.claim(board.post("render"), "me", 0.2)
    assert next(board.wait(MOST_SECONDS)).uuid == job.uuid


def test_waiting_for_the_end_of_a_job(board):
    job = board.claim(board.post("render"), "me")
    assert not job.wait(0.05)
    ended: list[bool] = []
    another = board.find(job.uuid)
    waiter = threading.Thread(target=lambda: ended.append(another.wait(10)))
    waiter.start()
    board.consume(job, "me")
    waiter.join(MOST_SECONDS)
    assert ended == [True]


@pytest.mark.parametrize("clustered", [False, True])
def test_wake_ups_come_by_event(redis_client, redis_server, clustered, monkeypatch):
    """Of those who wait and found nothing each is woken, and none of them because it looks again."""
    woken: list[str] = []
    reads: list[int] = []
    reads_after_post = 0

    def blocked() -> int:
        return int(redis_client.info("clients")["blocked_clients"])

    with (
        redis.Redis.from_url(redis_server.url, decode_responses=True) as patient,
        JobBoard(patient, "cue", name="tests", clustered=clustered) as board,
    ):
        read = patient.xread
        monkeypatch.setattr(patient, "xread", lambda *args, **options: reads.append(1) or read(*args, **options))
        for number in range(10):
            waiter = threading.Thread(target=lambda: woken.append(board.claim(next(board.wait(300)), "me").name))
            others = blocked()
            waiter.start()
            eventually(lambda others=others: blocked() > others, what="a waiter that has looked, and found nothing")
            before = len(reads)
            board.post(f"render{number}")
            assert blocked() == others, "the post itself has ended its wait"
            waiter.join(100)
            assert not waiter.is_alive()
            reads_after_post += len(reads) - before
    assert woken == [f"render{number}" for number in range(10)]
    # Who ignored its event would read once more each time; a look that ends by itself just then does so, too.
    assert reads_after_post < 5
