"""The log of verdicts: one round trip a pass, read back newest first, and nothing left of jobs that are gone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from opencue_sched.coordination import keys
from opencue_sched.dispatch.report import LONGEST_ERROR
from opencue_sched.dispatch.verdicts import (
    BELIEVED_SECONDS,
    KEPT_SECONDS,
    MOST_WRITTEN,
    RecordedVerdict,
    VerdictLog,
    VerdictNotes,
)
from opencue_sched.domain.hosts import Resources
from opencue_sched.domain.verdicts import LayerVerdict, Shortage, Verdict
from tests.kit.frozen_clock import Clock
from tests.kit.polling import eventually


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


# What passes note, and the thread writes.


@pytest.fixture
def notes(verdicts: VerdictLog, clock: Clock) -> VerdictNotes:
    return VerdictNotes(verdicts, lambda layers: layers, clock=clock)


def test_what_a_pass_notes_is_written_with_the_next_write_and_not_before(
    notes: VerdictNotes, verdicts: VerdictLog, clock: Clock
) -> None:
    notes.record({"alloc-1": [verdict("j1", "a")], "manual-1": [verdict("j1", "a", Verdict.NO_HOST)]})
    assert of_job(verdicts, "j1") == {}
    clock.now = 1000.5
    notes.write()
    found = of_job(verdicts, "j1")["a"]
    assert {(one.cluster, one.verdict.verdict, one.at) for one in found} == {
        ("alloc-1", Verdict.NO_FIT, 1000.0),
        ("manual-1", Verdict.NO_HOST, 1000.0),
    }


def test_what_has_not_changed_is_written_again_after_half_a_minute_alone(
    notes: VerdictNotes, verdicts: VerdictLog, clock: Clock
) -> None:
    # given a verdict that is written, and that passes give again
    notes.record({"alloc-1": [verdict("j1", "a")]})
    notes.write()
    clock.now = 1010.0
    notes.record({"alloc-1": [verdict("j1", "a")]})
    notes.write()
    # then it has the time of the first until half a minute is over, and then that of the last look
    assert of_job(verdicts, "j1")["a"][0].at == 1000.0
    clock.now = 1031.0
    notes.write()
    assert of_job(verdicts, "j1")["a"][0].at == 1010.0
    # and one that changes is written at once
    clock.now = 1032.0
    notes.record({"alloc-1": [verdict("j1", "a", Verdict.CAPACITY)]})
    notes.write()
    assert [(one.verdict.verdict, one.at) for one in of_job(verdicts, "j1")["a"]] == [(Verdict.CAPACITY, 1032.0)]


def test_a_process_does_not_write_over_what_another_saw_later(
    notes: VerdictNotes, verdicts: VerdictLog, clock: Clock
) -> None:
    # given a layer that this process looked at once, and another one later
    notes.record({"alloc-1": [verdict("j1", "a", Verdict.CAPACITY)]})
    notes.write()
    clock.now = 1020.0
    verdicts.record({"alloc-1": [verdict("j1", "a", Verdict.FLOWING)]})
    # when all is due to be written again, then the later one stays
    clock.now = 1040.0
    notes.write()
    assert of_job(verdicts, "j1")["a"][0].verdict.verdict is Verdict.FLOWING


def test_no_more_than_so_many_are_written_at_once_and_the_rest_next(
    notes: VerdictNotes, verdicts: VerdictLog, clock: Clock
) -> None:
    given = [verdict("j1", f"l{number}") for number in range(MOST_WRITTEN + 10)]
    notes.record({"alloc-1": given})
    notes.write()
    assert len(of_job(verdicts, "j1")) == MOST_WRITTEN
    notes.write()
    assert len(of_job(verdicts, "j1")) == MOST_WRITTEN + 10


def test_layers_that_wait_no_more_are_forgotten(verdicts: VerdictLog, clock: Clock) -> None:
    waiting = {"a", "b"}
    notes = VerdictNotes(verdicts, lambda layers: waiting & set(layers), clock=clock)
    notes.record({"alloc-1": [verdict("j1", "a"), verdict("j1", "b")]})
    waiting.discard("b")
    notes.write()
    assert (set(of_job(verdicts, "j1")), len(notes)) == ({"a"}, 1)
    # and so are those that no pass has looked at for as long as a verdict is believed
    clock.now += BELIEVED_SECONDS + 1
    notes.write()
    assert len(notes) == 0


def test_what_redis_did_not_take_is_written_once_it_answers(
    verdicts: VerdictLog, dead_redis: redis.Redis, redis_client: redis.Redis, clock: Clock
) -> None:
    # given a Redis that is away, then the pass is not disturbed, and the write says so
    notes = VerdictNotes(VerdictLog(dead_redis, "cue", clock=clock), lambda layers: layers, clock=clock)
    notes.record({"alloc-1": [verdict("j1", "a")]}, commits={"alloc-1": "no connection"})
    notes.record({}, shortages={("s1", "alloc-1"): [busy()]})
    with pytest.raises(redis.ConnectionError):
        notes.write()
    # when it answers again
    dead_redis.connection_pool = redis_client.connection_pool
    notes.write()
    assert set(of_job(verdicts, "j1")) == {"a"}
    assert len(of_show(verdicts)) == 1


def test_failed_commits_are_kept_with_the_pass(notes: VerdictNotes, verdicts: VerdictLog) -> None:
    for _ in range(2):
        notes.record({"alloc-1": []}, commits={"alloc-1": "deadlock"})
    assert [(one.cluster, one.failures, one.error) for one in verdicts.failed_commits(["alloc-1"])] == [
        ("alloc-1", 2, "deadlock")
    ]


def busy(cores: int = 4, tag: str = "general") -> Shortage:
    return Shortage((tag,), Resources(cores, 1024), Verdict.CAPACITY, "no host has that idle")


def of_show(verdicts: VerdictLog, show: str = "s1") -> list[tuple[str, tuple[Shortage, ...], float]]:
    return [(recorded.cluster, recorded.shortages, recorded.at) for recorded in verdicts.of_show(show)]


def test_what_layers_wait_for_that_nobody_looked_at_is_kept_once_for_a_show_and_cluster(
    notes: VerdictNotes, verdicts: VerdictLog, clock: Clock
) -> None:
    # given two passes of a second, over two clusters
    notes.record({}, shortages={("s1", "alloc-1"): [busy(4), busy(2)], ("s2", "alloc-2"): [busy()]})
    notes.record({}, shortages={("s1", "manual-1"): [busy(1, "gpu")]})
    notes.write()
    assert sorted(of_show(verdicts)) == [
        ("alloc-1", (busy(4), busy(2)), 1000.0),
        ("manual-1", (busy(1, "gpu"),), 1000.0),
    ]

    # when a pass finds the same, then it is written half a minute later
    clock.now = 1010.0
    notes.record({}, shortages={("s1", "manual-1"): [busy(1, "gpu")]})
    notes.write()
    assert {at for *_, at in of_show(verdicts)} == {1000.0}
    clock.now = 1031.0
    notes.write()
    assert of_show(verdicts)[0] == ("manual-1", (busy(1, "gpu"),), 1010.0)

    # and at once where a pass finds another thing, or nothing
    clock.now = 1032.0
    notes.record({}, shortages={("s1", "alloc-1"): []})
    notes.write()
    assert of_show(verdicts)[0] == ("alloc-1", (), 1032.0)


def test_a_process_does_not_write_over_the_shortages_that_another_found_later(
    notes: VerdictNotes, verdicts: VerdictLog, clock: Clock
) -> None:
    # given a cluster that this process passed over once, and another one later
    notes.record({}, shortages={("s1", "alloc-1"): [busy(4)]})
    notes.write()
    clock.now = 1020.0
    verdicts.record({}, shortages={("s1", "alloc-1"): [busy(2)]})
    # when all is due to be written again, then the later ones stay
    clock.now = 1040.0
    notes.write()
    assert of_show(verdicts) == [("alloc-1", (busy(2),), 1020.0)]


def test_shortages_that_nobody_can_read_or_that_are_a_day_old_are_deleted(
    redis_client: redis.Redis, verdicts: VerdictLog, clock: Clock
) -> None:
    verdicts.record({}, shortages={("s1", "alloc-1"): [busy()]})
    clock.now += KEPT_SECONDS + 1
    verdicts.record({}, shortages={("s1", "alloc-2"): [busy()]})
    for number, text in enumerate(("no json", "[1]", '[1.0, [[["a"], [1], "new", ""]]]')):
        redis_client.hset(keys.shortages("cue", "s1"), f"bad-{number}", text)
    for _ in range(2):
        assert [cluster for cluster, *_ in of_show(verdicts)] == ["alloc-2"]
    assert redis_client.hkeys(keys.shortages("cue", "s1")) == ["alloc-2"]


def test_verdicts_wait_where_shortages_take_what_a_second_may_have(
    notes: VerdictNotes, verdicts: VerdictLog, redis_client: redis.Redis
) -> None:
    notes.record({"alloc-1": [verdict("j1", f"l{number}") for number in range(MOST_WRITTEN)]})
    notes.record({}, shortages={("s1", f"alloc-{number}"): [busy()] for number in range(10)})
    notes.write()
    assert len(of_job(verdicts, "j1")) + len(of_show(verdicts)) == MOST_WRITTEN
    notes.write()
    assert len(of_job(verdicts, "j1")) == MOST_WRITTEN


def test_the_thread_writes_what_passes_note(verdicts: VerdictLog) -> None:
    notes = VerdictNotes(verdicts, lambda layers: layers)
    notes.writing.start()
    try:
        notes.record({"alloc-1": [verdict("j1", "a")]})
        eventually(lambda: of_job(verdicts, "j1"))
    finally:
        notes.writing.stop()


def test_what_workers_left_that_are_gone_is_deleted(
    notes: VerdictNotes, verdicts: VerdictLog, clock: Clock, redis_client: redis.Redis
) -> None:
    # given what a worker of two days ago wrote of a show, whose cluster nobody looks at any more
    verdicts.record({}, shortages={("s1", "alloc-1@gone"): [busy()]})
    clock.now += 2 * 86_400
    # when a worker writes what it finds of the show, then only that is left
    notes.record({}, shortages={("s1", "alloc-1@here"): [busy()]})
    notes.write()
    assert set(redis_client.hkeys("cue:shortages:s1")) == {"alloc-1@here"}
