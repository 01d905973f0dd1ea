"""The log of verdicts: one round trip a pass, read back newest first, and nothing left of jobs that are gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from opencue_sched.coordination import keys
from opencue_sched.dispatch.report import LONGEST_ERROR
from opencue_sched.dispatch.verdicts import KEPT_SECONDS, RecordedVerdict, VerdictLog
from opencue_sched.domain.verdicts import LayerVerdict, Verdict


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def verdicts(redis_client: redis.Redis, clock: Clock) -> VerdictLog:
    return VerdictLog(redis_client, "cue", clock=clock)


def verdict(job: str, layer: str, what: Verdict = Verdict.NO_FIT, detail: str = "too big") -> LayerVerdict:
    return LayerVerdict(job, layer, what, frames=2, waiting=8, detail=detail)


def of_job(verdicts: VerdictLog, job: str) -> dict[str, tuple[RecordedVerdict, ...]]:
    return verdicts.of_jobs([job])[job]


def test_the_verdicts_of_a_pass_are_read_back_by_job(verdicts: VerdictLog, clock: Clock) -> None:
    given = [verdict("j1", "a"), verdict("j1", "b", Verdict.FLOWING, ""), verdict("j2", "c")]
    verdicts.record({"alloc-1": given})
    found = of_job(verdicts, "j1")
    assert set(found) == {"a", "b"}
    assert [(one.verdict, one.cluster, one.at) for one in found["a"]] == [(given[0], "alloc-1", 1000.0)]
    assert found["b"][0].verdict == given[1]
    assert of_job(verdicts, "unknown") == {}


def test_a_layer_has_one_verdict_of_each_cluster_the_newest_first(verdicts: VerdictLog, clock: Clock) -> None:
    verdicts.record({"manual-1": [verdict("j1", "a", Verdict.NO_HOST)]})
    clock.now = 1010.0
    verdicts.record({"alloc-1": [verdict("j1", "a", Verdict.CAPACITY)]})
    clock.now = 1020.0
    verdicts.record({"manual-1": [verdict("j1", "a", Verdict.FLOWING)]})
    found = of_job(verdicts, "j1")["a"]
    assert [(one.verdict.verdict, one.cluster) for one in found] == [
        (Verdict.FLOWING, "manual-1"),
        (Verdict.CAPACITY, "alloc-1"),
    ]


def test_recording_takes_one_round_trip(
    redis_client: redis.Redis, verdicts: VerdictLog, monkeypatch: pytest.MonkeyPatch
) -> None:
    sent: list[int] = []
    original = redis.connection.Connection.send_packed_command

    def counting(self: redis.connection.Connection, command: object, check_health: bool = True) -> object:
        sent.append(1)
        return original(self, command, check_health)  # type: ignore[no-untyped-call]

    redis_client.ping()
    monkeypatch.setattr(redis.connection.Connection, "send_packed_command", counting)
    verdicts.record({"alloc-1": [verdict(f"j{number}", f"l{number}") for number in range(20)]})
    assert len(sent) == 1


def test_verdicts_expire_with_the_last_pass_that_looked(redis_client: redis.Redis, verdicts: VerdictLog) -> None:
    verdicts.record({"alloc-1": [verdict("j1", "a")]})
    assert KEPT_SECONDS - 10 <= int(redis_client.ttl(keys.verdicts("cue", "j1"))) <= KEPT_SECONDS
    redis_client.expire(keys.verdicts("cue", "j1"), 100)
    verdicts.record({"alloc-1": [verdict("j1", "b")]})
    assert int(redis_client.ttl(keys.verdicts("cue", "j1"))) > 100


def test_long_details_are_cut_and_unreadable_entries_left_out(redis_client: redis.Redis, verdicts: VerdictLog) -> None:
    verdicts.record({"alloc-1": [verdict("j1", "a", detail="x" * 10_000)]})
    for number, text in enumerate(("no json", "[]", '{"verdict": "new"}', "{}")):
        redis_client.hset(keys.verdicts("cue", "j1"), f"b{number}|alloc-1", text)
    found = of_job(verdicts, "j1")
    assert set(found) == {"a"}
    assert len(found["a"][0].verdict.detail) == LONGEST_ERROR


@pytest.fixture
def dead_redis() -> Iterator[redis.Redis]:
    client = redis.Redis(host="127.0.0.1", port=1, socket_connect_timeout=1.0, decode_responses=True, retry=None)
    yield client
    client.close()


def test_a_redis_that_is_away_does_not_disturb_the_pass(dead_redis: redis.Redis) -> None:
    verdicts = VerdictLog(dead_redis, "cue")
    verdicts.record({"alloc-1": [verdict("j1", "a")]})
    verdicts.record({"alloc-1": []})
    with pytest.raises(redis.ConnectionError):
        of_job(verdicts, "j1")
