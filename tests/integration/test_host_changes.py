"""The change log of hosts on a real Redis, and the cache it keeps current on a real database."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import redis

from opencue_sched.placement.changes import HostChanges

KEY = "cue:hosts:changed"


@pytest.fixture
def changes(redis_client: redis.Redis) -> HostChanges:
    return HostChanges(redis_client, "cue")


@pytest.fixture
def round_trips(redis_client: redis.Redis, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Grows by one with each exchange with Redis."""
    seen: list[int] = []
    get_connection = redis_client.connection_pool.get_connection

    def counted(*args: object, **options: object) -> object:
        seen.append(1)
        return get_connection(*args, **options)

    monkeypatch.setattr(redis_client.connection_pool, "get_connection", counted)
    yield seen


def cursor_of(changes: HostChanges) -> str:
    return changes.since(None)[0]


class TestReading:
    def test_a_reader_without_a_cursor_reads_every_host(self, changes: HostChanges) -> None:
        assert changes.since(None)[1] is None

    def test_an_empty_log_has_nothing_new(self, changes: HostChanges) -> None:
        cursor = cursor_of(changes)

        assert changes.since(cursor) == (cursor, frozenset())

    def test_what_was_published_since_is_read_once_by_each_reader(self, changes: HostChanges) -> None:
        changes.publish(["h0"])
        first = second = cursor_of(changes)

        changes.publish(["h1", "h2"])
        first, ids = changes.since(first)
        assert ids == {"h1", "h2"}

        changes.publish(["h2", "h3"])
        assert changes.since(first)[1] == {"h2", "h3"}
        second, ids = changes.since(second)
        assert ids == {"h1", "h2", "h3"}
        assert changes.since(second) == (second, frozenset())

    def test_the_first_entries_after_an_empty_log_are_not_missed(self, changes: HostChanges) -> None:
        # given a reader of the empty log: nothing tells it whether entries were trimmed before the first it sees
        cursor = cursor_of(changes)

        changes.publish(["h1"])

        cursor, ids = changes.since(cursor)
        assert ids is None or ids == {"h1"}
        changes.publish(["h2"])
        assert changes.since(cursor)[1] == {"h2"}

    def test_a_reader_far_behind_reads_every_host(self, changes: HostChanges, redis_client: redis.Redis) -> None:
        changes.publish(["h0"])
        cursor = cursor_of(changes)
        pipeline = redis_client.pipeline(transaction=False)
        for number in range(1001):
            pipeline.xadd(KEY, {"hosts": f'["h{number}"]'})
        pipeline.execute()

        cursor, ids = changes.since(cursor)

        assert ids is None
        assert changes.since(cursor) == (cursor, frozenset())


class TestLosses:
    def test_a_trimmed_cursor_reads_every_host(self, changes: HostChanges, redis_client: redis.Redis) -> None:
        changes.publish(["h1"])
        cursor = cursor_of(changes)
        changes.publish(["h2"])
        changes.publish(["h3"])
        redis_client.xtrim(KEY, maxlen=1, approximate=False)

        cursor, ids = changes.since(cursor)

        assert ids is None
        changes.publish(["h4"])
        assert changes.since(cursor)[1] == {"h4"}

    def test_a_log_that_vanished_is_noticed(self, changes: HostChanges, redis_client: redis.Redis) -> None:
        changes.publish(["h1"])
        cursor = cursor_of(changes)

        redis_client.flushdb()

        cursor, ids = changes.since(cursor)
        assert ids is None
        assert changes.since(cursor) == (cursor, frozenset())

    @pytest.mark.parametrize("first_id", ["1-1", "99999999999999-1"], ids=["clock went back", "clock went on"])
    def test_a_log_that_began_anew_is_noticed(
        self, changes: HostChanges, redis_client: redis.Redis, first_id: str
    ) -> None:
        # given a fail-over to a Redis without the log, where others have published since
        changes.publish(["h1"])
        cursor = cursor_of(changes)
        redis_client.flushdb()
        redis_client.xadd(KEY, {"hosts": '["h2"]'}, id=first_id)

        assert changes.since(cursor)[1] is None

    @pytest.mark.parametrize("fields", [{"other": "x"}, {"hosts": "h1"}, {"hosts": "{}"}, {"hosts": "[1]"}])
    def test_an_entry_that_is_not_ours_reads_every_host_and_is_passed(
        self, changes: HostChanges, redis_client: redis.Redis, fields: dict[str, str]
    ) -> None:
        changes.publish(["h1"])
        cursor = cursor_of(changes)
        redis_client.xadd(KEY, fields)  # type: ignore[arg-type]

        cursor, ids = changes.since(cursor)

        assert ids is None
        assert changes.since(cursor) == (cursor, frozenset())


class TestPublishing:
    def test_a_thousand_hosts_are_published_and_read_in_one_round_trip_each(
        self, changes: HostChanges, redis_client: redis.Redis, round_trips: list[int]
    ) -> None:
        changes.publish(["h0"])
        cursor = cursor_of(changes)
        round_trips.clear()

        changes.publish([f"h{number}" for number in range(1000)])
        assert len(round_trips) == 1

        ids = changes.since(cursor)[1]
        assert len(round_trips) == 2
        assert ids is not None
        assert len(ids) == 1000
        assert redis_client.xlen(KEY) == 5

    def test_nothing_to_publish_is_no_round_trip(self, changes: HostChanges, round_trips: list[int]) -> None:
        changes.publish([])

        assert round_trips == []

    def test_the_log_does_not_grow_without_bound(self, redis_client: redis.Redis) -> None:
        changes = HostChanges(redis_client, "cue", keep_entries=100)

        for number in range(1000):
            changes.publish([f"h{number}"])

        assert redis_client.xlen(KEY) < 300

    def test_namespaces_are_apart(self, redis_client: redis.Redis) -> None:
        ours, theirs = HostChanges(redis_client, "cue"), HostChanges(redis_client, "other")
        ours.publish(["h0"])
        cursor = cursor_of(ours)

        theirs.publish(["h1"])

        assert ours.since(cursor)[1] == frozenset()
