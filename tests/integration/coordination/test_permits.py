"""Layer permits: jobs of a board of their own, taken and given back in one call, exclusive, expiring."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from opencue_sched.coordination.board import BoardScripts
from opencue_sched.coordination.jobboard import Job, JobBoard, JobState
from opencue_sched.coordination.keys import BoardKeys, permit_board
from opencue_sched.coordination.permits import JOBS_PER_CALL, SECONDS_PER_FRAME, LayerPermits
from opencue_sched.coordination.postings import ClusterPostings
from opencue_sched.domain.clusters import Cluster, ClusterKind
from tests.kit.redis_log import RedisLog

KEYS = permit_board("cue")
HOUR_MS = 3_600_000


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred times as long as they live elsewhere: longer than any machine stands still."""
    monkeypatch.setattr("opencue_sched.coordination.permits.SECONDS_PER_FRAME", 100 * SECONDS_PER_FRAME)


@pytest.fixture
def permits(redis_client: redis.Redis) -> LayerPermits:
    return LayerPermits(redis_client, "cue", claim_ttl=300)


@pytest.fixture
def board(redis_client: redis.Redis) -> Iterator[JobBoard]:
    """The permits, as any board is looked at."""
    with JobBoard(redis_client, KEYS.ns, name=KEYS.board) as board:
        yield board
        assert list(board.trashed()) == [], "every permit can be read"


def permit(board: JobBoard, layer: str) -> Job:
    job = board.find(layer)
    assert job is not None
    return job


def ran_out(client: redis.Redis, *layers: str) -> None:
    """As if whoever has these permits had had them for longer than they live."""
    for layer in layers:
        client.hset(KEYS.job(layer), "expires", 1)
        client.zadd(KEYS.of("claimed"), {layer: 1}, xx=True)


def left(client: redis.Redis) -> set[str]:
    """What there is of the board, but for the number of the last job and what was told."""
    return {*client.scan_iter(f"{KEYS.prefix}*")} - {KEYS.of("seq"), KEYS.of("events")}


def test_permits_are_exclusive_and_live_two_seconds_a_frame_but_no_longer_than_a_claim(redis_client, permits, board):
    assert permits.take({"pass-1": {"a": 1000, "b": 0}}) == {"a", "b"}
    assert permits.take({"pass-2": {"a": 1, "c": 1}}) == {"c"}
    assert SECONDS_PER_FRAME == 2
    assert 250 < permit(board, "a").expires_in() <= 300
    assert 150 < permit(board, "b").expires_in() <= 200
    for layer in "ab":
        assert float(redis_client.hget(KEYS.job(layer), "expires")) == redis_client.zscore(KEYS.of("claimed"), layer)
    # and who asks again has it anew, not for what was left of the first time
    redis_client.zincrby(KEYS.of("claimed"), -250_000, "a")
    assert permit(board, "a").expires_in() < 100
    assert permits.take({"pass-1": {"a": 1000}}) == {"a"}
    assert permit(board, "a").expires_in() > 200
    # where claims live longer, so do permits
    longer = LayerPermits(redis_client, "cue", claim_ttl=1000)
    longer.take({"pass-1": {"a": 4, "b": 1000}})
    assert 300 < permit(board, "a").expires_in() <= 800 < permit(board, "b").expires_in() <= 1000


def test_who_read_before_a_booking_is_told_of_it_and_who_read_after_it_is_not(redis_client, permits):
    at_first = permits.log_end()
    LayerPermits(redis_client, "cue", claim_ttl=300).tell_booked({"a", "b"})
    between = permits.log_end()
    permits.tell_booked({"b"})
    permits.tell_booked(set())
    assert permits.booked_since(at_first) == {"a", "b"}
    assert permits.booked_since(between) == {"b"}
    assert permits.booked_since(permits.log_end()) == frozenset()
    assert 0 < redis_client.ttl("cue:layers:booked") <= 60, "nobody reads for as long as that"


def test_only_the_owner_drops_a_permit(permits):
    permits.take({"pass-1": {"a": 1}})
    assert permits.drop({"pass-2": ["a"]}) == 0
    assert permits.drop({"pass-1": ["a", "never-taken"]}) == 1
    assert permits.take({"pass-2": {"a": 1}}) == {"a"}
    assert permits.take({"pass-1": {}}) == frozenset()
    assert permits.drop({"pass-1": []}) == 0


def test_a_pass_has_the_permits_that_a_dead_one_of_its_cluster_left(permits, board):
    """Its claim has run out, or this one could not be at work; the permits may live a moment longer."""
    permits.take({"cluster-1|died": {"a": 10}})
    permits.take({"cluster-2|works": {"b": 10}})
    fence = permit(board, "a").fence
    assert permits.take({"cluster-1|next": {"a": 10, "b": 10}}) == {"a"}
    assert permit(board, "a").fence > fence
    assert permits.drop({"cluster-1|died": ["a"]}) == 0, "it was frozen, and goes on"
    assert permits.take({"cluster-2|works": {"a": 1}}) == frozenset()


def test_a_permit_is_a_job_of_a_board_while_somebody_has_it(redis_client, permits, board):
    clusters = ClusterPostings(redis_client, BoardKeys("cue", "clusters"))
    clusters.enqueue([Cluster("fac", "show", ClusterKind.ALLOC, ("general",), "alloc")])
    told = redis_client.xlen(clusters.keys.of("events"))
    permits.take({"cluster-1|pass": {"a": 1, "b": 1}})
    first, second = board.iterjobs()
    assert [first.uuid, second.uuid] == ["a", "b"]
    assert (first.state, first.fence < second.fence) == (JobState.CLAIMED, True)
    assert {board.find_owner(job) for job in (first, second)} == {"cluster-1"}
    assert board.job_count == 2
    assert list(board.iterjobs(only_unclaimed=True)) == []
    assert permits.drop({"cluster-1|pass": ["a", "b"]}) == 2
    assert (first.state, board.job_count, left(redis_client)) == (JobState.COMPLETE, 0, set())
    # one that comes again has a higher fence than it had, so no handle from before is anything
    permits.take({"cluster-1|next": {"a": 1}})
    assert permit(board, "a").fence > first.fence
    assert redis_client.xlen(clusters.keys.of("events")) == told, "nobody who waits for clusters is woken"


@pytest.mark.parametrize("looked", [False, True], ids=["nobody looked", "somebody looked since"])
def test_what_the_dead_left_is_forgotten_by_whoever_takes_next(redis_client, permits, board, looked):
    """Layers that have finished are asked for by nobody again."""
    layers = {f"finished{number:02}": 1 for number in range(45)}
    permits.take({"cluster-1|died": layers})
    ran_out(redis_client, *layers)
    if looked:
        assert board.job_count == len(layers)
    were = redis_client.zcard(KEYS.of("listed"))
    assert permits.take({"cluster-2|works": {"a": 1}}) == {"a"}
    assert were - 25 < redis_client.zcard(KEYS.of("listed")) < were, "so many that nobody else waits for it"
    for _ in range(2):
        permits.take({"cluster-2|works": {"a": 1}})
    assert redis_client.zrange(KEYS.of("listed"), 0, -1) == ["a"]
    permits.drop({"cluster-2|works": ["a"]})
    assert left(redis_client) == set()


@pytest.mark.parametrize("looked", [False, True], ids=["nobody looked", "somebody looked since"])
def test_a_permit_that_ran_out_is_the_next_ones_and_one_that_nobody_took_since_is_given_back(
    redis_client, permits, board, looked
):
    permits.take({"slow|1": {"a": 1, "b": 1, "c": 1}})
    ran_out(redis_client, "a", "b")
    assert permits.take({"other|1": {"a": 1, "c": 1}}) == {"a"}
    assert permits.drop({"slow|1": ["a", "b", "c"]}) == 1, "b is forgotten by now, and a is the other's"
    ran_out(redis_client, "a")
    if looked:
        assert permit(board, "a").state is JobState.UNCLAIMED
    assert permits.drop({"other|1": ["a"]}) == 1
    assert left(redis_client) == set()


def test_no_permit_of_the_dead_waits_for_a_clock_that_was_put_back(redis_client, permits):
    permits.take({"cluster-1|died": {"a": 1}})
    for field in ("modified", "expires"):
        redis_client.hincrby(KEYS.job("a"), field, HOUR_MS)
    redis_client.zincrby(KEYS.of("claimed"), HOUR_MS, "a")
    assert permits.take({"cluster-2|works": {"a": 1}}) == {"a"}


def test_a_layer_whose_permit_was_put_aside_is_nobodys_until_it_is_restored(redis_client, permits):
    permits.take({"cluster-1|pass": {"a": 1}})
    BoardScripts(redis_client, KEYS).update("a", "trash", "look at it first", force=True)
    assert permits.take({"cluster-1|pass": {"a": 1, "b": 1}}) == {"b"}
    assert permits.drop({"cluster-1|pass": ["a", "b"]}) == 1
    BoardScripts(redis_client, KEYS).update("a", "restore")
    assert permits.take({"cluster-2|pass": {"a": 1}}) == {"a"}
    # or until it has been there for so long that nobody will look
    BoardScripts(redis_client, KEYS).update("a", "trash", "look at it first", force=True)
    redis_client.zadd(KEYS.of("trash"), {"a": 1})
    assert permits.take({"cluster-2|pass": {"a": 1}}) == {"a"}


@pytest.mark.parametrize("layers", [JOBS_PER_CALL, JOBS_PER_CALL + 1])
def test_all_layers_of_a_pass_are_one_call_and_of_a_long_one_two_in_one_round_trip(
    redis_client, redis_server, permits, layers
):
    wanted = {f"layer{number}": 1 for number in range(layers)}
    permits.take({"warm|1": {"warm": 1}})
    permits.drop({"warm|1": ["warm"]})
    with RedisLog(redis_server.url) as log:
        assert permits.take({"cluster-1|pass": wanted}) == wanted.keys()
        assert permits.drop({"cluster-1|pass": wanted}) == layers
        asked = log.since(0)
    calls = -(-layers // JOBS_PER_CALL)
    assert len([call for call in asked if call.runs("board_take_many")]) == calls
    assert len([call for call in asked if call.runs("board_consume_many")]) == calls
    assert len(asked) < 4 * layers + 40 * calls, "what they do there"


def test_a_pass_has_the_permits_whose_answer_was_lost(proxy, proxied, board):
    permits = LayerPermits(proxied, "cue", claim_ttl=300)
    permits.take({"warm|1": {"warm": 1}})
    permits.drop({"warm|1": ["warm"]})
    proxy.lose("EVALSHA")
    assert permits.take({"cluster-1|pass": {"a": 1, "b": 1}}) == {"a", "b"}
    assert (proxy.lost, board.job_count) == (1, 2)
    proxy.lose("EVALSHA")
    permits.drop({"cluster-1|pass": ["a", "b"]})
    assert (proxy.lost, board.job_count) == (2, 0)


def test_of_owners_who_want_the_same_layers_each_has_those_nobody_had(permits, board):
    taken = [permits.take({f"owner{n}|token": {f"layer{m}": 60 for m in range(n, n + 3)}}) for n in range(3)]
    assert [sorted(layers) for layers in taken] == [["layer0", "layer1", "layer2"], ["layer3"], ["layer4"]]
    fences = [permit(board, layer).fence for layers in taken for layer in layers]
    assert len({*fences}) == len(fences)
    fence = permit(board, "layer0").fence
    assert permits.take({"owner0|token": {"layer0": 60}}) == {"layer0"}
    assert permit(board, "layer0").fence == fence, "its claim, that lives anew"
    assert permits.take({"owner0|another": {"layer0": 60}}) == {"layer0"}
    assert permit(board, "layer0").fence > fence
