"""Replies on real Redis."""

from __future__ import annotations

import json
import threading

import pytest

from opencue_sched.coordination import replies
from opencue_sched.coordination.keys import job_hash, reply_queue
from opencue_sched.errors import SchedulerError
from tests.kit.polling import MOST_SECONDS


def test_an_answer_wakes_who_waits_and_ends_with_its_hash(redis_client):
    job = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=10)
    got: list[dict] = []
    waiter = threading.Thread(
        target=lambda: got.append(replies.await_reply(redis_client, "cue", job, timeout_seconds=10))
    )
    waiter.start()
    assert replies.answer_job(redis_client, "cue", job, {"booked": 3})
    waiter.join(MOST_SECONDS)
    assert got == [{"booked": 3}]
    hash_ = redis_client.hgetall(job_hash("cue", job))
    assert hash_["status"] == "done"
    assert json.loads(hash_["output"]) == {"booked": 3}
    assert {"created_at", "ended_at"} <= hash_.keys()
    assert 3500 < redis_client.ttl(job_hash("cue", job)) <= 3600


def test_a_late_reader_finds_the_answer_in_the_hash(redis_client):
    job = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=1)
    replies.answer_job(redis_client, "cue", job, {"booked": 3})
    assert 0 < redis_client.ttl(reply_queue("cue", job)) <= 3600
    unanswered = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=300)
    assert 3600 < redis_client.ttl(job_hash("cue", unanswered)) <= 3900
    redis_client.delete(reply_queue("cue", job))
    assert replies.await_reply(redis_client, "cue", job, timeout_seconds=1) == {"booked": 3}


def test_the_first_answer_stands_and_no_answer_is_told(redis_client):
    job = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=1)
    assert replies.answer_job(redis_client, "cue", job, {"n": 1})
    assert not replies.answer_job(redis_client, "cue", job, {"n": 2})
    assert redis_client.llen(reply_queue("cue", job)) == 1
    silent = replies.open_job(redis_client, "cue", "dispatch", waits_seconds=30)
    assert redis_client.hget(job_hash("cue", silent), "status") == "dispatched"
    with pytest.raises(SchedulerError, match="opencue-sched fleet"):
        replies.await_reply(redis_client, "cue", silent, timeout_seconds=0.05)
    assert redis_client.hget(job_hash("cue", silent), "status") == "dispatched"
