"""How a process's backlog follows the database: what is read when something is named, and what the workers tell each
other of what nobody named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import redis
from sqlalchemy import Engine, text
from sqlalchemy.exc import OperationalError

from opencue_sched.coordination import keys
from opencue_sched.coordination.change_log import BacklogChanges
from opencue_sched.dispatch.backlog_feed import (
    RESYNC_SECONDS,
    SHOWS_READ_SECONDS,
    WHOLE_ROUND_LAYERS_PER_SECOND,
    WHOLE_ROUND_SECONDS,
    BacklogFeed,
)
from opencue_sched.domain.shards import ALL_BUCKETS
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, JobSpec, LayerSpec
from opencue_sched.settings import Settings
from opencue_sched.store.schema import check_schema
from tests.kit.frozen_clock import Clock
from tests.kit.gathering import counted_statements
from tests.kit.statements import failing_statements, listening

JOBS = 20


@dataclass
class Follower:
    """A worker that hears no notice, and compares the layers of its ``own`` buckets."""

    engine: Engine
    settings: Settings
    client: redis.Redis
    instance: str
    own: frozenset[int]
    clock: Clock = field(default_factory=Clock)
    told: list[set[str]] = field(default_factory=list)
    """The shows of which it said, each time, that they have work of which nobody was told."""

    def __post_init__(self) -> None:
        with self.engine.connect() as connection:
            facts = check_schema(connection)
        self.feed = BacklogFeed(
            self.engine,
            self.settings.model_copy(update={"instance": self.instance}),
            lambda: facts,
            BacklogChanges(self.client, "cue"),
            own=lambda: self.own,
            found=lambda shows: self.told.append(set(shows)),
            clock=self.clock,
        )
        self.feed.follow()
        self.feed.resync()

    def compares(self) -> None:
        """Make the round of the resync that is due by now."""
        self.clock.now += RESYNC_SECONDS
        self.feed.resync()

    def hears(self) -> None:
        """Look at what the others found, before a round is due."""
        self.feed.resync()

    def knows(self) -> set[str]:
        return set(self.feed.backlog.versions())


Follow = Callable[..., Follower]


@pytest.fixture
def waiting(engine: Engine) -> list[JobIds]:
    with engine.begin() as connection:
        return Farm(connection).jobs([JobSpec([LayerSpec(frames=2)]) for _ in range(JOBS)])


@pytest.fixture
def follow(engine: Engine, settings: Settings, redis_client: redis.Redis, waiting: list[JobIds]) -> Follow:
    # In an empty log the first entry may follow others that are gone, so that everything is compared.
    BacklogChanges(redis_client, "cue").publish(["something-else"])

    def made(instance: str, *, own: frozenset[int] = ALL_BUCKETS) -> Follower:
        return Follower(engine, settings, redis_client, instance, own)

    return made


def layers_of(*jobs: JobIds) -> set[str]:
    return {layer.id for job in jobs for layer in job.layers}


def new_job(engine: Engine) -> JobIds:
    with engine.begin() as connection:
        return Farm(connection).job([LayerSpec(frames=1)], name="new")


def pause(engine: Engine, *jobs: JobIds) -> None:
    with engine.begin() as connection:
        paused = text("UPDATE job SET b_paused = true WHERE pk_job = ANY(:jobs)")
        connection.execute(paused, {"jobs": [job.id for job in jobs]})


# Watch


def test_all_that_was_named_is_read_in_one_statement_and_nothing_where_nothing_was(
    follow: Follow, engine: Engine, waiting: list[JobIds]
) -> None:
    worker = follow("one")
    with counted_statements(engine) as statements:
        worker.feed.follow()
    assert statements == []

    # when layers, jobs and a show are named, of which some wait no more
    pause(engine, *waiting[:4])
    worker.feed.note(layers_of(*waiting[:6]), jobs=[job.id for job in waiting[3:9]], shows=[])
    with counted_statements(engine) as statements:
        worker.feed.follow()
    assert len(statements) == 1
    assert worker.knows() == layers_of(*waiting[4:])

    # and once a second the shows and limits
    worker.clock.now += SHOWS_READ_SECONDS
    with counted_statements(engine) as statements:
        worker.feed.follow()
        worker.feed.follow()
    assert len(statements) == 2


def test_the_shows_are_not_read_while_nothing_waits(follow: Follow, engine: Engine, waiting: list[JobIds]) -> None:
    # given a worker that knows of no work
    pause(engine, *waiting)
    worker = follow("one")
    assert not worker.knows()

    # when it looks ten times a second apart, then it asks nothing
    with counted_statements(engine) as statements:
        for _ in range(10):
            worker.clock.now += SHOWS_READ_SECONDS
            worker.feed.follow()
    assert statements == []

    # and when work comes, with a subscription whose burst nobody told of, then both are known at once
    come = new_job(engine)
    with engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = 4200"))
    worker.feed.note(jobs=[come.id])
    worker.feed.follow()
    assert worker.knows() == layers_of(come)
    assert {share.burst_centicores for share in worker.feed.shares([come.show.id])} == {4200}


def test_the_shows_are_read_while_a_layer_waits_whose_rows_make_no_sense(
    follow: Follow, engine: Engine, waiting: list[JobIds]
) -> None:
    """Or nobody would say of it what is wrong, in a show that may book again."""
    # given a worker that knows of nothing else, and a show that may not book
    with engine.begin() as connection:
        connection.execute(text("UPDATE layer SET int_mem_min = 1::bigint << 55"))
        connection.execute(text("UPDATE subscription SET int_burst = 0"))
    worker = follow("one")
    show = waiting[0].show.id
    assert len(list(worker.feed.backlog.bad(show))) == len(waiting)
    assert not worker.feed.may_book(show)
    # when it has a burst, of which nobody told, then that is known with the next look
    with engine.begin() as connection:
        connection.execute(text("UPDATE subscription SET int_burst = 4200"))
    worker.clock.now += SHOWS_READ_SECONDS
    worker.feed.follow()
    assert worker.feed.may_book(show)


@pytest.mark.parametrize(
    "closes, opens",
    [
        ("UPDATE show SET b_paused = true", "UPDATE show SET b_paused = false"),
        ("UPDATE subscription SET int_burst = 0", "UPDATE subscription SET int_burst = 10000"),
    ],
    ids=["paused", "without a burst"],
)
def test_a_show_that_may_book_again_is_said_once_though_nobody_told(
    follow: Follow, engine: Engine, waiting: list[JobIds], closes: str, opens: str
) -> None:
    worker = follow("one")
    for statement in (closes, opens, "SELECT 1"):
        # when the show changes, or does not, and the shows are read
        with engine.begin() as connection:
            connection.execute(text(statement))
        worker.clock.now += SHOWS_READ_SECONDS
        worker.feed.follow()
    # then its clusters are woken when it opens
    assert worker.told == [{waiting[0].show.id}]


# Resync


def test_what_one_worker_finds_the_others_read_though_they_compare_nothing_of_it(
    follow: Follow, engine: Engine, waiting: list[JobIds]
) -> None:
    # given two workers, to one of which all layers belong
    all_of_them, none = follow("one"), follow("two", own=frozenset())

    # when work comes and goes, of which nobody tells, and the first finds that
    come = new_job(engine)
    pause(engine, waiting[0])
    all_of_them.compares()
    none.hears()

    # then both know, and say whose it is
    assert all_of_them.knows() == none.knows() == layers_of(*waiting[1:], come)
    assert all_of_them.told == none.told == [{come.show.id}]


def test_only_what_differs_is_read_whole_and_told(
    follow: Follow, engine: Engine, redis_client: redis.Redis, waiting: list[JobIds]
) -> None:
    worker = follow("one")
    log = BacklogChanges(redis_client, "cue")
    cursor, _ = log.since(None)

    # when frames were booked, of which a layer's version says nothing
    with engine.begin() as connection:
        connection.execute(text("UPDATE layer_stat SET int_waiting_count = 1"))
    with counted_statements(engine) as statements:
        worker.compares()
    assert len(statements) == 1
    assert log.since(cursor)[1] == frozenset()

    # and when one layer has changed
    changed = layers_of(waiting[3])
    with engine.begin() as connection:
        more = text("UPDATE layer SET int_cores_min = int_cores_min + 100 WHERE pk_layer = ANY(:layers)")
        connection.execute(more, {"layers": list(changed)})
    with counted_statements(engine) as statements:
        worker.compares()
    assert len(statements) == 2
    assert log.since(cursor)[1] == changed


def test_what_could_not_be_told_is_told_with_the_next_round(
    follow: Follow, engine: Engine, redis_client: redis.Redis, waiting: list[JobIds]
) -> None:
    all_of_them, none = follow("one"), follow("two", own=frozenset())
    log = keys.backlog_changes("cue")

    # given a Redis that takes nothing into the log
    redis_client.rename(log, "aside")
    redis_client.set(log, "somebody's")
    come = new_job(engine)
    all_of_them.compares()
    none.hears()
    assert none.knows() == layers_of(*waiting)

    # when it does again
    redis_client.rename("aside", log)
    all_of_them.compares()
    none.hears()
    assert none.knows() == layers_of(*waiting, come)


def test_who_may_have_missed_what_others_told_compares_all(
    follow: Follow, engine: Engine, redis_client: redis.Redis, waiting: list[JobIds]
) -> None:
    # given a worker to which no layer belongs, and work that another one found and told of
    none = follow("two", own=frozenset())
    come = new_job(engine)
    none.hears()
    assert none.knows() == layers_of(*waiting)

    # when the log does not have any more what was told since the worker looked last
    log = BacklogChanges(redis_client, "cue")
    log.publish(layers_of(come), by="one")
    redis_client.delete(keys.backlog_changes("cue"))
    log.publish(["something-else"], by="one")
    none.hears()

    # then it has compared everything
    assert none.knows() == layers_of(*waiting, come)


def test_a_round_over_all_layers_that_fails_is_made_again_as_one(
    follow: Follow, engine: Engine, waiting: list[JobIds]
) -> None:
    # given a worker to which no layer belongs, and that missed what the others heard
    none = follow("two", own=frozenset())
    come = new_job(engine)
    none.feed.missed()

    # when PostgreSQL does not answer its round over all layers, and then does
    gone = OperationalError("SELECT", {}, Exception("gone"))
    with failing_statements(engine, gone), pytest.raises(OperationalError):
        none.feed.resync()
    none.feed.resync()

    # then it has compared everything
    assert none.knows() == layers_of(*waiting, come)


def test_what_is_missed_during_a_round_has_all_compared_at_once(
    follow: Follow, engine: Engine, waiting: list[JobIds]
) -> None:
    # given a worker to which no layer belongs, and that hears no more during a round
    none = follow("two", own=frozenset())
    with listening(engine, "after_cursor_execute", lambda *_: none.feed.missed()):
        none.compares()

    # when the next round is made, then it is over all layers
    come = new_job(engine)
    none.feed.resync()
    assert none.knows() == layers_of(*waiting, come)


def test_rounds_over_all_layers_are_the_rarer_the_more_there_are(
    follow: Follow, engine: Engine, waiting: list[JobIds]
) -> None:
    # given a worker to which no layer belongs, among as many as all processes have
    with engine.begin() as connection:
        many = Farm(connection).job([LayerSpec(frames=1)] * 200, name="many")
    none = follow("two", own=frozenset())
    seconds = (JOBS + 200) * len(ALL_BUCKETS) / WHOLE_ROUND_LAYERS_PER_SECOND
    assert seconds > 1.5 * WHOLE_ROUND_SECONDS

    # when work comes of which nobody tells, also to those that compare it
    come = new_job(engine)
    none.clock.now += WHOLE_ROUND_SECONDS
    none.feed.resync()
    assert none.knows() == layers_of(*waiting, many)

    # then its first round over all layers finds that, which is no sooner than a later one
    none.clock.now += seconds - WHOLE_ROUND_SECONDS
    none.feed.resync()
    assert none.knows() == layers_of(*waiting, many, come)
