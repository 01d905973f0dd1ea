"""The change logs on a real Redis, and the host cache that one keeps current on a real database."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import pytest
import redis
from sqlalchemy import Engine, text

from opencue_sched.coordination.change_log import BacklogChanges, HostChanges
from opencue_sched.domain.hosts import Host, Resources
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.placement.host_cache import HostCache, HostGroups, HostOrder
from opencue_sched.settings import HostCacheSettings
from opencue_sched.store.hosts import fetch_buckets, fetch_groups, fetch_hosts_by_id
from tests.conftest import RedisServer
from tests.kit.redis_log import RedisLog

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
            pipeline.xadd(KEY, {"hosts": f"h{number}"})
        pipeline.execute()

        cursor, ids = changes.since(cursor)

        assert ids is None
        assert changes.since(cursor) == (cursor, frozenset())


class TestWriters:
    def test_a_process_does_not_hear_of_what_it_wrote_itself(self, changes: HostChanges) -> None:
        changes.publish(["h0"])
        cursor = cursor_of(changes)

        changes.publish(["h1", "h2"], by="w1")
        changes.publish(["h2", "h3"], by="w2")

        assert changes.since(cursor, but_of="w1")[1] == {"h2", "h3"}
        assert changes.since(cursor, but_of="w2")[1] == {"h1", "h2"}
        assert changes.since(cursor)[1] == {"h1", "h2", "h3"}

    def test_entries_that_name_no_writer_are_others(self, changes: HostChanges, redis_client: redis.Redis) -> None:
        # given a worker of the release before, and a report service
        changes.publish(["h0"])
        cursor = cursor_of(changes)
        redis_client.xadd(KEY, {"hosts": "h1"})
        changes.publish(["h2"])

        assert changes.since(cursor, but_of="w1")[1] == {"h1", "h2"}
        assert changes.since(cursor, but_of="")[1] == {"h1", "h2"}

    def test_a_reader_that_asks_for_the_others_alone_reads_everything_after_a_gap(
        self, changes: HostChanges, redis_client: redis.Redis
    ) -> None:
        changes.publish(["h1"], by="w1")
        cursor = cursor_of(changes)
        changes.publish(["h2"], by="w1")
        changes.publish(["h3"], by="w1")
        redis_client.xtrim(KEY, maxlen=1, approximate=False)

        assert changes.since(cursor, but_of="w1")[1] is None

    def test_the_release_before_reads_entries_that_name_their_writer(
        self, changes: HostChanges, redis_client: redis.Redis
    ) -> None:
        changes.publish(["h1", "h2"], by="w1")

        ((_, entry),) = redis_client.xrange(KEY)

        assert entry["hosts"].split() == ["h1", "h2"]


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
        redis_client.xadd(KEY, {"hosts": "h2"}, id=first_id)

        assert changes.since(cursor)[1] is None

    @pytest.mark.parametrize("fields", [{"other": "x"}, {"hosts": ""}, {"hosts": "{}"}])
    def test_an_entry_that_is_not_ours_is_passed_and_hides_no_other(
        self, changes: HostChanges, redis_client: redis.Redis, fields: dict[str, str]
    ) -> None:
        changes.publish(["h1"])
        cursor = cursor_of(changes)
        redis_client.xadd(KEY, fields)  # type: ignore[arg-type]
        changes.publish(["h2"])

        cursor, ids = changes.since(cursor)

        assert ids is not None
        assert "h2" in ids
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
        assert redis_client.xlen(KEY) == 2

    def test_a_look_that_finds_nothing_is_one_command(self, changes: HostChanges, redis_server: RedisServer) -> None:
        # given an empty log, and one whose entries were all read
        for ids in ((), ["h0"]):
            changes.publish(ids)
            cursor = cursor_of(changes)

            with RedisLog(redis_server.url) as log:
                for _ in range(10):
                    assert changes.since(cursor) == (cursor, frozenset())
                asked = [call.text for call in log.since(0) if KEY in call.text]

            assert len(asked) == 10, asked

    def test_nothing_to_publish_is_no_round_trip(self, changes: HostChanges, round_trips: list[int]) -> None:
        changes.publish([])

        assert round_trips == []

    def test_the_log_does_not_grow_without_bound(self, changes: HostChanges, redis_client: redis.Redis) -> None:
        changes.publish(["h0"])
        ((_, entry),) = redis_client.xrange(KEY)
        with redis_client.pipeline(transaction=False) as pipe:
            for _ in range(20_000):
                pipe.xadd(KEY, entry)
            pipe.execute()

        changes.publish(["h1"])

        assert 10_000 <= redis_client.xlen(KEY) < 10_500

    def test_hosts_and_layers_are_apart(self, changes: HostChanges, redis_client: redis.Redis) -> None:
        layers = BacklogChanges(redis_client, "cue")
        changes.publish(["h0"])
        layers.publish(["l0"])
        of_hosts, of_layers = cursor_of(changes), layers.since(None)[0]

        changes.publish(["h1"])
        layers.publish(["l1", "l2"], by="w1")
        layers.publish(["l3"], by="w2")

        assert changes.since(of_hosts)[1] == {"h1"}
        assert layers.since(of_layers, but_of="w2")[1] == {"l1", "l2"}

    def test_namespaces_are_apart(self, redis_client: redis.Redis) -> None:
        ours, theirs = HostChanges(redis_client, "cue"), HostChanges(redis_client, "other")
        ours.publish(["h0"])
        cursor = cursor_of(ours)

        theirs.publish(["h1"])

        assert ours.since(cursor)[1] == frozenset()


STALENESS = 120.0
ONE_CORE = Resources(cores=1, memory_kb=0, gpus=0, gpu_memory_kb=0)
TAKE_CORES = text("UPDATE host SET int_cores_idle = int_cores_idle - :centicores WHERE pk_host = :host")


class Worker:
    """One process: a cache over PostgreSQL, and its place in the change log."""

    def __init__(self, engine: Engine, changes: HostChanges, facility_id: str) -> None:
        self.engine, self.changes, self.facility_id = engine, changes, facility_id
        # Groups never expire here: whatever is seen later has come through the change log.
        self.cache = HostCache(HostCacheSettings(), self.fetch, clock=lambda: 0.0)
        self.cursor, _ = changes.since(None)
        self.cache.refresh(facility_id, ["general"])

    def fetch(self, facility_id: str, tags: Sequence[str] | None, buckets: Collection[int]) -> Sequence[Host]:
        with self.engine.connect() as connection:
            if tags is None:
                return fetch_buckets(connection, [facility_id], STALENESS, buckets)
            return fetch_groups(connection, facility_id, tags, STALENESS, buckets)

    def gather(self) -> None:
        self.cursor, ids = self.changes.since(self.cursor)
        if ids is None:
            self.cache.expire()
            while not self.cache.reread().pause:
                pass
        elif ids:
            read_at = self.cache.instant()
            with self.engine.connect() as connection:
                found = fetch_hosts_by_id(connection, sorted(ids), STALENESS)
            self.cache.apply(found, ids - {host.id for host in found}, read_at=read_at)
        self.cache.refresh(self.facility_id, ["general"])

    def idle(self) -> dict[str, int]:
        """Idle cores of every bookable host by name."""
        seen: dict[str, int] = {}
        self.cache.find(
            HostGroups(self.facility_id, ["general"]),
            ONE_CORE,
            HostOrder(),
            lambda host: seen.__setitem__(host.name, host.idle_cores) or False,  # type: ignore[func-returns-value]
        )
        return seen

    def book(self, proc_id: str, cores: int) -> str:
        """Plan, commit and publish one proc; its host's id."""
        need = Resources(cores, 0, 0, 0)
        host = self.cache.find(HostGroups(self.facility_id, ["general"]), need, HostOrder(), lambda _: True)
        assert host is not None
        assert self.cache.take(host, {proc_id: Resources(cores, 0)})
        take_cores(self.engine, host.id, cores)
        self.cache.settle(host.id, proc_id, committed=True)
        self.changes.publish([host.id])
        return host.id


def take_cores(engine: Engine, host_id: str, cores: int) -> None:
    with engine.begin() as connection:
        connection.execute(TAKE_CORES, {"centicores": cores * 100, "host": host_id})


@pytest.fixture
def workers(engine: Engine, changes: HostChanges) -> tuple[Worker, Worker]:
    """Two processes that know a farm of two hosts."""
    with engine.begin() as connection:
        farm = Farm(connection)
        facility_id = farm.facility()
        farm.host(name="small", cores=8)
        farm.host(name="large", cores=16)
    changes.publish(["anything"])
    return Worker(engine, changes, facility_id), Worker(engine, changes, facility_id)


class TestTwoProcesses:
    def test_what_one_books_and_frees_the_other_sees_at_its_next_gather(
        self, engine: Engine, changes: HostChanges, workers: tuple[Worker, Worker]
    ) -> None:
        booker, other = workers
        assert other.idle() == {"small": 8, "large": 16}

        # when one process books
        host_id = booker.book("p1", 6)
        assert booker.idle() == {"small": 2, "large": 16}
        other.gather()
        booker.gather()
        assert booker.idle() == other.idle() == {"small": 2, "large": 16}

        # and the frame ends, without any host report
        take_cores(engine, host_id, -6)
        changes.publish([host_id])
        booker.gather()
        other.gather()

        # then both see the cores again
        assert booker.idle() == other.idle() == {"small": 8, "large": 16}

    def test_a_host_that_was_locked_leaves_every_cache(
        self, engine: Engine, changes: HostChanges, workers: tuple[Worker, Worker]
    ) -> None:
        with engine.begin() as connection:
            host_id = connection.execute(
                text("UPDATE host SET str_lock_state = 'LOCKED' WHERE str_name = 'small' RETURNING pk_host")
            ).scalar_one()
        changes.publish([host_id])

        for worker in workers:
            worker.gather()
            assert worker.idle() == {"large": 16}

    def test_a_lost_log_makes_every_process_read_everything(
        self, engine: Engine, redis_client: redis.Redis, workers: tuple[Worker, Worker]
    ) -> None:
        booker, other = workers
        booker.book("p1", 6)
        redis_client.flushdb()

        other.gather()

        assert other.idle() == {"small": 2, "large": 16}
