"""The jobboard's operations, as TaskFlow names them, with the differences we chose."""

from __future__ import annotations

import inspect
import re
import threading
import time
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from itertools import takewhile
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis

from opencue_sched.coordination.board import PAGE, JobPriority
from opencue_sched.coordination.board_events import POSTED, REMOVAL
from opencue_sched.coordination.jobboard import (
    DOES_NOT_EXPIRE,
    NO_CLAIM,
    BoardClosed,
    ClaimLost,
    Entity,
    FormerJob,
    Job,
    JobBoard,
    JobFailure,
    JobState,
    LogBook,
    NotFound,
    UnclaimableJob,
    fetch,
)
from opencue_sched.domain.redis_url import UNDECODABLE
from opencue_sched.errors import StoreUnusable
from opencue_sched.insight.health import check_redis
from tests.kit.old_redis import old_redis
from tests.kit.polling import MOST_SECONDS, eventually
from tests.kit.redis_log import RedisLog
from tests.kit.sentinel import watched_pair


@pytest.fixture(params=[False, True], ids=["plain keys", "one hash tag"])
def board(redis_client, request):
    with JobBoard(redis_client, "cue", name="tests", clustered=request.param) as opened:
        yield opened


# Connection


def test_a_board_is_connected_between_connect_and_close(redis_client):
    board = JobBoard(redis_client, "cue")
    assert not board.connected
    board.connect()
    assert board.connected
    board.close()
    assert not board.connected


def test_a_client_that_does_not_decode_is_refused(redis_server):
    with redis.Redis.from_url(redis_server.url) as plain, pytest.raises(ValueError, match="decode_responses=True"):
        JobBoard(plain, "cue")


def test_a_board_is_connected_again_after_it_was_closed(redis_client):
    board = JobBoard(redis_client, "cue")
    for _ in range(2):
        with board:
            board.consume(board.claim(board.post("render"), "me"), "me")
    assert redis_client.ping()


def test_the_board_has_the_names_of_taskflows():
    """What code written for TaskFlow's boards calls, with the arguments it gives."""
    operations = {
        "connect": (),
        "close": (),
        "post": ("name", "book", "details", "priority"),
        "iterjobs": ("only_unclaimed", "ensure_fresh"),
        "wait": ("timeout",),
        "find_owner": ("job",),
        "claim": ("job", "who", "expiry"),
        "abandon": ("job", "who"),
        "consume": ("job", "who"),
        "trash": ("job", "who"),
        "register_entity": ("entity",),
    }
    for name, arguments in operations.items():
        parameters = list(inspect.signature(getattr(JobBoard, name)).parameters)
        assert parameters[1 : len(arguments) + 1] == list(arguments), name
    assert isinstance(JobBoard.connected, property)
    assert isinstance(JobBoard.job_count, property)
    assert list(inspect.signature(Job.wait).parameters)[1:] == [
        "timeout",
        "delay",
        "delay_multiplier",
        "max_delay",
        "sleep_func",
    ]
    assert [state.value for state in JobState] == ["UNCLAIMED", "CLAIMED", "COMPLETE", "TRASHED"]
    assert {priority.value for priority in JobPriority} == {"VERY_HIGH", "HIGH", "NORMAL", "LOW", "VERY_LOW"}
    assert issubclass(UnclaimableJob, JobFailure)
    assert not issubclass(NotFound, JobFailure)


def test_every_call_on_a_closed_board_fails_clearly(redis_client):
    with JobBoard(redis_client, "cue") as board:
        job = board.post("render")
        board.claim(job, "me")
    calls = [
        lambda: board.post("x"),
        lambda: board.iterjobs(),
        lambda: board.wait(0.01),
        lambda: board.job_count,
        lambda: board.find_owner(job),
        lambda: board.claim(job, "me"),
        lambda: board.claim_next("me"),
        lambda: board.consume(job, "me"),
        lambda: board.abandon(job, "me"),
        lambda: board.trash(job, "me"),
        lambda: board.register_entity(Entity("conductor", "me")),
        lambda: board.entities(),
        lambda: board.find(job.uuid),
        lambda: list(board.trashed()),
        lambda: board.restore(job.uuid),
        lambda: board.notifier.register("POSTED", print),
        lambda: job.state,
        lambda: job.expires_in(),
        lambda: job.extend_expiry(1),
        lambda: job.wait(0.01),
        lambda: job.last_modified,
    ]
    for call in calls:
        with pytest.raises(BoardClosed):
            call()
    assert issubclass(BoardClosed, JobFailure)


def test_a_store_that_does_not_answer_is_a_job_failure():
    dead = redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=0.2, decode_responses=True, retry=None)
    with pytest.raises(JobFailure, match=r"127\.0\.0\.1:1\b"):
        JobBoard(dead, "cue").connect()
    dead.close()


def test_losing_the_store_is_a_job_failure_for_those_who_look(proxy, proxied):
    with JobBoard(proxied, "cue") as board:
        job = board.post("render")
        proxy.lose("EVALSHA", times=2)  # a call is tried twice
        with pytest.raises(JobFailure):
            assert job.state
        assert proxy.lost == 2
        assert job.state is JobState.UNCLAIMED


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
def test_a_redis_that_evicts_is_refused(redis_client, policy):
    try:
        redis_client.config_set("maxmemory-policy", policy)
        with pytest.raises(JobFailure, match=r"maxmemory-policy.*noeviction"):
            JobBoard(redis_client, "cue").connect()
    finally:
        redis_client.config_set("maxmemory-policy", "noeviction")


def test_a_redis_that_is_too_old_is_refused(settings):
    with old_redis("6.0.16") as client:
        with pytest.raises(JobFailure, match=r"6\.0\.16.*6\.2"):
            JobBoard(client, "cue").connect()
        with pytest.raises(StoreUnusable, match=r"6\.0\.16.*6\.2"):
            check_redis(client, settings)


# Posting and looking


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


# Claims


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


# Ends


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


# Next, delays, poison


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
    """L6: delayed items are never lost, and each is handed out once."""
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


# Waiting


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


# Entities, fetch


def test_registered_entities_are_remembered_for_their_life(board):
    board.register_entity(Entity("conductor", "c1", {"host": "a"}))
    board.register_entity(Entity("conductor", "c2"), ttl_seconds=0.05)
    eventually(lambda: len(board.entities()) == 1)
    (left,) = board.entities()
    assert (left.kind, left.name, left.metadata) == ("conductor", "c1", {"host": "a"})


def test_boards_are_fetched_by_configuration_or_uri(redis_client, redis_server):
    by_conf = fetch("mine", {"board": "redis", "namespace": "cue", "claim_ttl": 5}, client=redis_client)
    uri = f"{redis_server.url}?namespace=cue&clustered=false"
    by_uri = fetch("mine", uri)
    with by_conf, by_uri:
        job = by_conf.post("render")
        assert [found.uuid for found in by_uri.iterjobs()] == [job.uuid]
        assert by_conf.claim(job, "me").expires_in() <= 5
    by_uri.client.close()


def test_a_board_is_fetched_by_the_name_of_its_backend_alone(redis_client, redis_server):
    by_name = fetch("mine", "redis", client=redis_client)
    by_uri_in_conf = fetch("mine", {"board": f"{redis_server.url}?claim_ttl=500", "namespace": "cue", "claim_ttl": 700})
    with by_name, by_uri_in_conf:
        job = by_name.post("render")
        (found,) = by_uri_in_conf.iterjobs()
        assert found == job
        assert 500 < by_uri_in_conf.claim(found, "me").expires_in() <= 700, "what stands in the configuration wins"
    by_uri_in_conf.client.close()


def test_a_board_finds_its_redis_by_a_sentinel(tmp_path):
    with watched_pair(tmp_path) as pair:
        named = urlsplit(pair.url)
        conf = {
            "board": "redis",
            "host": "127.0.0.1",
            "port": pair.port,
            "password": named.password,
            "sentinel": "farm",
            "sentinel_fallbacks": ["127.0.0.1:1"],
            "sentinel_kwargs": {"password": "of-the-sentinel", "ssl_ca_certs": "without TLS it says nothing"},
        }
        with fetch("mine", conf) as board:
            job = board.post("render")
            assert [found.uuid for found in board.iterjobs()] == [job.uuid]
        board.client.close()


@pytest.mark.parametrize(
    ("conf", "connection"),
    [
        (
            {"board": "redis", "encoding": "latin-1", "encoding_errors": "strict", "health_check_interval": "9"},
            {"encoding": "latin-1", "encoding_errors": "strict", "health_check_interval": 9, "decode_responses": True},
        ),
        ("redis://redis/?retry_on_timeout=yes", {"retry_on_timeout": True, "encoding_errors": UNDECODABLE}),
        ("unix:///run/redis.sock?db=3", {"path": "/run/redis.sock", "db": 3}),
        ("unix://me:word@/run/redis.sock", {"path": "/run/redis.sock", "username": "me", "password": "word"}),
        ("redis://redis:6380/2?password=word", {"host": "redis", "port": 6380, "db": 2, "password": "word"}),
        ("redis://redis/?socket_connect_timeout=3", {"host": "redis", "socket_connect_timeout": 3.0}),
        ("rediss://redis/?ssl_ca_certs=/ca.pem", {"host": "redis", "ssl_ca_certs": "/ca.pem"}),
        ({"board": "redis", "ssl": "yes", "ssl_ca_certs": "/ca.pem"}, {"ssl_ca_certs": "/ca.pem"}),
        ({"board": "redis", "unix_socket_path": "/run/redis.sock"}, {"path": "/run/redis.sock"}),
        ({"board": "redis", "host": "redis", "port": "6380"}, {"host": "redis", "port": 6380}),
    ],
)
def test_a_board_is_fetched_from_where_its_configuration_says(conf, connection):
    made = fetch("mine", conf).client.connection_pool.connection_kwargs
    assert {name: made.get(name) for name in connection} == connection


def test_unknown_backends_and_settings_are_refused(redis_client):
    with pytest.raises(NotFound, match=r"'zookeeper'.*redis"):
        fetch("mine", {"board": "zookeeper"})
    with pytest.raises(ValueError, match="hots"):
        fetch("mine", {"board": "redis", "hots": "typo"}, client=redis_client)
    with pytest.raises(ValueError, match=r"sentinel.*host.*port"):
        fetch("mine", "redis://redis:26379?sentinel=farm")
    with pytest.raises(ValueError, match="'board'"):
        fetch("mine", {})


def test_times_are_those_of_redis(board):
    def now() -> datetime:
        seconds, micros = board.client.time()
        return datetime.fromtimestamp(seconds + micros / 1e6, UTC)

    before = now()
    created = board.post("render").created_on
    assert created.tzinfo is not None
    assert before - timedelta(milliseconds=1) <= created <= now()
