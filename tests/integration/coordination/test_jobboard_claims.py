"""Claims of jobs: which job is the next, whose it is, for how long, and how a claim ends."""

from __future__ import annotations

import threading
from contextlib import contextmanager
from itertools import takewhile
from uuid import uuid4

import pytest
import redis

from opencue_sched.coordination.jobboard import (
    DOES_NOT_EXPIRE,
    NO_CLAIM,
    ClaimLost,
    JobBoard,
    JobFailure,
    JobState,
    NotFound,
    UnclaimableJob,
)
from tests.kit.polling import MOST_SECONDS, eventually


def test_claiming_takes_the_job_from_the_others(board):
    job = board.post("render")
    board.claim(job, "me")
    assert board.find_owner(job) == "me"
    assert job.state is JobState.CLAIMED
    assert list(board.iterjobs(only_unclaimed=True)) == []
    with pytest.raises(UnclaimableJob, match="'me'"):
        board.claim(next(board.iterjobs()), "somebody else")
    assert job.last_modified >= job.created_on


def test_owners_and_expiries_are_checked(board):
    job = board.post("render")
    for who in (None, 3, b"me"):
        with pytest.raises(TypeError):
            board.claim(job, who)
    with pytest.raises(ValueError, match="owner"):
        board.claim(job, "")
    for expiry in (0, -1, float("nan")):
        with pytest.raises(ValueError, match="above 0"):
            board.claim(job, "me", expiry)
    assert board.find_owner(job) is None


def test_claiming_what_is_gone_is_not_found(board):
    job = board.post("render")
    stale = board.find(job.uuid)
    board.consume(board.claim(job, "me"), "me")
    with pytest.raises(NotFound):
        board.claim(stale, "me")


def test_claims_expire_by_default_and_for_ever_is_an_explicit_choice(board):
    job, lasting = board.post("a"), board.post("b")
    board.claim(job, "me")
    board.claim(lasting, "me", board.NEVER)
    assert 30 < job.expires_in() <= 60
    assert lasting.expires_in() == DOES_NOT_EXPIRE
    assert board.post("c").expires_in() == NO_CLAIM


def test_the_same_owner_cannot_claim_twice_but_sets_a_new_expiry(board):
    job = board.post("render")
    board.claim(job, "me", 10)
    with pytest.raises(UnclaimableJob):
        board.claim(job, "me", 1000)
    assert 900 < job.expires_in() <= 1000
    with pytest.raises(UnclaimableJob):
        board.claim(job, "me")
    assert 900 < job.expires_in() <= 1000
    with pytest.raises(UnclaimableJob):
        board.claim(job, "somebody else", 5000)
    assert job.expires_in() <= 1000


def test_an_expired_claim_frees_the_job(board):
    job = board.claim(board.post("render"), "me", 0.05)
    eventually(lambda: job.state is JobState.UNCLAIMED)
    assert board.find_owner(job) is None
    assert job.expires_in() == NO_CLAIM
    with pytest.raises(NotFound):
        board.consume(job, "me")
    assert not job.extend_expiry(10)


def test_extending_replaces_the_life_of_ones_own_claim_only(board):
    job = board.post("render")
    assert not job.extend_expiry(10)
    stranger = board.find(job.uuid)
    board.claim(job, "me", 300)
    assert job.extend_expiry(1000)
    assert 900 < job.expires_in() <= 1000
    with pytest.raises(ClaimLost):
        stranger.extend_expiry(5000)
    with pytest.raises(ValueError, match="above 0"):
        job.extend_expiry(0)
    assert 900 < job.expires_in() <= 1000


def test_a_fence_given_out_twice_does_not_let_a_stale_handle_write(board, redis_server):
    """Redis restarted from a dump, or a replica took over, that had not heard of the first claim."""
    job = board.post("render")
    with state_comes_back(redis_server):
        stale = board.claim(board.find(job.uuid), "me", 60)
    present = board.claim(board.find(job.uuid), "me", 60)
    assert present.fence == stale.fence
    for write in (
        lambda: board.consume(stale, "me"),
        lambda: board.abandon(stale, "me"),
        lambda: board.trash(stale, "me"),
        lambda: stale.extend_expiry(10),
    ):
        with pytest.raises(ClaimLost):
            write()
    assert present.extend_expiry(60)
    board.consume(present, "me")


@contextmanager
def state_comes_back(server):
    """What happens within is forgotten by Redis."""
    with redis.Redis.from_url(server.url) as raw:
        before = {key: raw.dump(key) for key in raw.keys("*")}
        yield
        raw.flushdb()
        for key, value in before.items():
            raw.restore(key, 0, value)


def test_a_stale_handle_of_the_same_owner_changes_nothing(board):
    """The owner's name alone is not enough."""
    job = board.post("render")
    old = board.claim(board.find(job.uuid), "me", 0.05)
    new = eventually(lambda: board.claim_next("me", 10))
    assert new.fence > old.fence
    for write in (
        lambda: board.consume(old, "me"),
        lambda: board.abandon(old, "me"),
        lambda: board.trash(old, "me"),
        lambda: old.extend_expiry(10),
    ):
        with pytest.raises(ClaimLost):
            write()
    assert job.state is JobState.CLAIMED
    board.consume(new, "me")
    assert job.state is JobState.COMPLETE


def test_fences_of_one_job_only_grow(board):
    job = board.post("render")
    fences = []
    for _ in range(4):
        fences.append(board.claim(job, "me").fence)
        board.abandon(job, "me")
    assert fences == sorted(set(fences))


def test_consuming_completes_the_job_once(board):
    job = board.claim(board.post("render"), "me")
    board.consume(job, "me")
    assert job.state is JobState.COMPLETE
    assert list(board.iterjobs()) == []
    with pytest.raises(NotFound):
        board.consume(job, "me")
    assert job.wait(0)


def test_abandoning_gives_the_job_to_others(board):
    job = board.claim(board.post("render"), "me")
    board.abandon(job, "me")
    assert job.state is JobState.UNCLAIMED
    assert board.claim_next("somebody").uuid == job.uuid


@pytest.mark.parametrize("end", ["consume", "abandon", "trash"])
def test_only_the_owner_ends_a_claim(board, end):
    job = board.post("render")
    with pytest.raises(NotFound):
        getattr(board, end)(job, "me")
    board.claim(job, "me")
    stranger = board.find(job.uuid)
    with pytest.raises(JobFailure, match="'somebody'"):
        getattr(board, end)(stranger, "somebody")
    assert board.find_owner(job) == "me"


def test_the_next_job_is_the_most_urgent_and_then_the_oldest(board):
    low, first, second = board.post("a", priority="low"), board.post("b"), board.post("c")
    urgent = board.post("d", priority="very_high")
    assert [board.claim_next("me").uuid for _ in range(4)] == [urgent.uuid, first.uuid, second.uuid, low.uuid]


def test_concurrent_claimants_get_different_jobs(board):
    uuids = {board.post(f"job-{number}").uuid for number in range(60)}
    taken: list[str] = []

    def work(who: str) -> None:
        while (job := board.claim_next(who)) is not None:
            taken.append(job.uuid)

    threads = [threading.Thread(target=work, args=(f"w{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(taken) == 60
    assert set(taken) == uuids


def test_a_delayed_job_is_listed_at_once_and_claimable_when_due(board):
    """A delayed job is never lost, and is handed out once."""
    job = board.post("render", delay=600.0)
    assert board.job_count == 1
    assert job.state is JobState.UNCLAIMED
    assert list(board.iterjobs(only_unclaimed=True)) == []
    with pytest.raises(UnclaimableJob, match=rf"{job.uuid}.* (600\.0|59\d\.\d) s"):
        board.claim(job, "me")
    board.client.zincrby(board.keys.of("delayed"), -600_000, job.uuid)
    assert next(board.wait(MOST_SECONDS)).uuid == job.uuid
    assert board.claim_next("me").uuid == job.uuid
    assert board.claim_next("me") is None


def test_delayed_jobs_are_each_handed_out_once_whoever_dies(board):
    uuids = {board.post(f"job-{number}", delay=0.05 * (number % 4)).uuid for number in range(40)}
    done: list[str] = []
    dying = 10

    def take() -> bool:
        nonlocal dying
        job = board.claim_next("me", 0.2 if dying else 60)
        if job is not None and dying:
            dying -= 1  # this one "dies": it never ends its claim
        elif job is not None:
            board.consume(job, "me")
            done.append(job.uuid)
        return board.job_count == 0

    eventually(take)
    assert sorted(done) == sorted(uuids)


def test_what_it_takes_to_claim_the_next_does_not_depend_on_how_many_there_are(redis_client):
    """No clock: the same commands on a board of 10 and of 5,000, and every range of them bounded."""
    did, end = {}, uuid4().hex
    for count in (10, 5000):
        with JobBoard(redis_client, "cue", name=f"of{count}") as board:
            jobs = [(f"{count}-{n}", "job", "", '{"v": 1, "details": {}}', n % 5, 0) for n in range(count)]
            board.call_each("board_post", jobs)
            with redis_client.monitor() as monitor:
                board.abandon(board.claim_next("me"), "me")
                redis_client.echo(end)
                commands = iter(lambda: monitor.next_command(), None)
                heard = list(takewhile(lambda it: end not in it["command"], commands))
        words = [it["command"].split() for it in heard if it["client_type"] == "lua"]
        ranges = [command for command in words if "RANGE" in command[0]]
        assert ranges
        assert all("LIMIT" in command for command in ranges), ranges
        did[count] = [(command[0], len(command)) for command in words]
    assert did[10] == did[5000]
    assert len(did[10]) < 60
