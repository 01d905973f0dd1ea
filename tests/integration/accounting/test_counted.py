"""A show that somebody else hands over, by changing its flag and nothing else, as a Cuebot does for cueadmin."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from sqlalchemy import text
from sqlalchemy.exc import DataError, OperationalError
from structlog.testing import capture_logs

from opencue_sched.accounting import keys, show_handover
from opencue_sched.accounting.bootstrap import ensure_bootstrapped
from opencue_sched.accounting.caps import load_caps
from opencue_sched.accounting.imported_shows import ImportNote, imported_shows, note_imported
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import NotReady
from opencue_sched.accounting.show_handover import ImportedShows, follow_handed_back, hand_over
from opencue_sched.domain.caps import Vertices
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import InvalidInput
from opencue_sched.store import accounting as store
from tests.integration.accounting.stepping import about_to, interrupted, stepped
from tests.kit.statements import listening, naming
from tests.kit.world import AGE, World


def counted(world: World, *, cuebots: bool = True) -> ImportedShows:
    quarantine = show_handover.CUEBOT_CACHE_SECONDS if cuebots else 0
    return ImportedShows(world.engine, world.ledger, quarantine_seconds=quarantine, age_seconds=AGE)


def flag(world: World, managed: bool) -> None:
    world.sql(
        "UPDATE show SET b_scheduler_managed = :managed WHERE pk_show = :show", managed=managed, show=world.show.id
    )


def note(world: World) -> None:
    """The world's show is counted as its row is now."""
    with world.engine.begin() as connection:
        note_imported(world.store.client, store.managed_show_versions(connection))


def pause_is_over(world: World) -> None:
    noted = ImportNote.parse(str(world.store.client.hget(keys.IMPORTED, world.show.id)))
    assert noted is not None
    assert noted.due > 0
    world.store.client.hset(keys.IMPORTED, world.show.id, ImportNote(noted.version, 1.0).text)


def test_what_cuebot_runs_is_counted_twice_with_a_pause_before_anything_is_booked(world: World) -> None:
    # given a show of Cuebot's with a burst of ten cores, of which six are used
    flag(world, False)
    world.sql("UPDATE subscription SET int_burst = 1000")
    first, *_ = world.run(3)
    flag(world, True)
    shows = counted(world)

    # then nothing is booked at once, nor by another process, though all is counted
    assert not shows.admits(world.show.id)
    assert not counted(world).admits(world.show.id)
    assert world.job_cores() == 6

    # and after the pause what a Cuebot booked late is counted too, so that what is left is left
    world.run(1)
    pause_is_over(world)
    assert shows.admits(world.show.id)
    assert world.job_cores() == 8
    booked = [Booking(f"new-{i}", world.entry(first).vertices, 2) for i in range(2)]
    assert world.ledger.book(booked).accepted == {"new-0"}


def test_without_a_cuebot_there_is_no_pause(world: World) -> None:
    world.run(2)
    assert counted(world, cuebots=False).admits(world.show.id)
    assert world.job_cores() == 4


def test_beside_a_cuebot_a_show_is_left_alone_although_nothing_of_it_ran(world: World) -> None:
    flag(world, False)
    flag(world, True)
    shows = counted(world)
    assert not shows.admits(world.show.id)
    assert not counted(world).admits(world.show.id)
    world.run(1)
    pause_is_over(world)
    assert shows.admits(world.show.id)
    assert world.job_cores() == 2


def test_a_show_whose_row_was_changed_is_counted_again_without_a_pause(world: World) -> None:
    note(world)
    shows = counted(world)
    assert shows.admits(world.show.id)
    flag(world, False)
    flag(world, True)
    assert shows.admits(world.show.id)


def test_a_show_that_was_away_and_is_back_is_counted_again_and_left_alone_if_cuebots_booked_there(
    world: World,
) -> None:
    note(world)
    shows = counted(world)
    assert shows.admits(world.show.id)
    flag(world, False)
    world.run(2)
    flag(world, True)

    # then what Cuebot runs counts at once, but one of them may go on for a while
    assert not shows.admits(world.show.id)
    assert world.job_cores() == 4
    world.exact()
    world.run(1)
    pause_is_over(world)
    assert shows.admits(world.show.id)
    assert world.job_cores() == 6


def test_a_show_of_our_own_flip_that_a_cuebot_took_and_gave_back_is_counted_before_it_is_booked(world: World) -> None:
    # given a show with a burst of ten cores, handed over by our command, where nobody has booked since
    flag(world, False)
    world.sql("UPDATE subscription SET int_burst = 1000")
    hand_over(world.engine, world.ledger, world.show.id, wait_seconds=0, age_seconds=AGE)

    # when a Cuebot takes it, runs frames and gives it back before any recompute has seen that
    flag(world, False)
    procs = world.run(4)
    flag(world, True)

    # then nobody books beside them what they have
    shows = counted(world, cuebots=False)
    assert shows.admits(world.show.id)
    booked = [Booking(f"new-{i}", world.entry(procs[0]).vertices, 2) for i in range(2)]
    assert world.ledger.book(booked).accepted == {"new-0"}


def test_a_show_that_a_cuebot_takes_and_gives_back_before_our_flip_has_noted_it_is_counted_by_whoever_books(
    world: World,
) -> None:
    flag(world, False)
    ours = stepped(world).ledger

    def away_and_back() -> None:
        flag(world, False)
        world.run(2)
        flag(world, True)

    interrupted(
        lambda: hand_over(world.engine, ours, world.show.id, wait_seconds=0, age_seconds=AGE),
        [about_to("HSET")],
        away_and_back,
    )
    with world.engine.connect() as connection:
        versions = store.managed_show_versions(connection)
    assert imported_shows(world.store.client)[world.show.id] != versions[world.show.id]
    assert counted(world, cuebots=False).admits(world.show.id)
    assert world.job_cores() == 4


def test_a_show_that_was_away_since_the_store_was_filled_is_counted_before_it_is_booked(world: World) -> None:
    world.store.client.flushdb()
    ensure_bootstrapped(world.engine, world.ledger, wait_age=0)
    flag(world, False)
    world.run(2)
    flag(world, True)
    assert counted(world, cuebots=False).admits(world.show.id)
    assert world.job_cores() == 4


def test_a_show_that_is_counted_costs_nothing_more(world: World) -> None:
    note(world)
    shows = counted(world)
    assert shows.admits(world.show.id)
    commands = world.store.client.info("stats")["total_commands_processed"]
    assert shows.admits(world.show.id)
    assert world.store.client.info("stats")["total_commands_processed"] == commands + 1, "the look itself"


def test_flips_of_ours_and_a_filled_store_have_counted(world: World) -> None:
    world.run(2)
    note(world)
    assert counted(world).admits(world.show.id)
    world.store.client.flushdb()
    ensure_bootstrapped(world.engine, world.ledger, wait_age=0)
    assert counted(world).admits(world.show.id)


def test_a_show_switched_on_while_the_store_is_filled_is_left_alone_like_any_other(world: World) -> None:
    world.store.client.flushdb()
    flag(world, False)
    ensure_bootstrapped(world.engine, world.ledger, wait_age=0.1, sleep=lambda _: flag(world, True))
    assert not counted(world).admits(world.show.id)


def test_a_store_that_is_lost_admits_nobody(world: World) -> None:
    note(world)
    shows = counted(world)
    assert shows.admits(world.show.id)
    world.store.client.flushdb()
    with pytest.raises(NotReady):
        world.ledger.learn_epoch()
    with pytest.raises(NotReady):
        shows.admits(world.show.id)
    assert not shows.admits("nobody")


def test_a_show_taken_back_by_cuebot_is_looked_after_and_has_to_be_counted_again(world: World) -> None:
    world.run(1)
    note(world)
    assert follow_handed_back(world.engine, world.ledger, age_seconds=AGE) == []
    flag(world, False)
    assert follow_handed_back(world.engine, world.ledger, age_seconds=AGE) == [world.show.id]
    assert world.store.client.zscore(keys.HANDED_BACK, world.show.id) is not None
    flag(world, True)
    assert not counted(world).admits(world.show.id)


@pytest.fixture
def shared(world: World) -> str:
    """A licence for three frames, held by the world's job and by one of another managed show; the job of that."""
    with world.engine.begin() as connection:
        farm = Farm(connection)
        limit = farm.limit("nuke", 3)
        show = farm.show("other")
        farm.subscription(show, farm.alloc("general"), size=100, burst=100)
        job = farm.job([LayerSpec(frames=5, limits=[limit])], show=show)
        connection.execute(
            text("INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES (:id, :layer, :limit)"),
            {"id": "shared-limit", "layer": world.job.layers[0].id, "limit": limit},
        )
    assert counted(world, cuebots=False).admits(show.id)
    return job.id


def lent(world: World, job_id: str) -> int:
    """How many frames of the job get the licence now; they are given back at once."""
    with world.engine.connect() as connection:
        row = connection.execute(
            text(
                "SELECT job.pk_show, layer.pk_layer, pk_limit_record, pk_folder, pk_dept, "
                "(SELECT pk_alloc FROM subscription WHERE subscription.pk_show = job.pk_show) AS pk_alloc "
                "FROM layer JOIN job USING (pk_job) JOIN layer_limit USING (pk_layer) WHERE pk_job = :job"
            ),
            {"job": job_id},
        ).one()
    vertices = Vertices(
        row.pk_show, row.pk_alloc, row.pk_folder, job_id, row.pk_layer, row.pk_dept, (row.pk_limit_record,)
    )
    load_caps(world.engine, world.ledger, [keys.limit(row.pk_limit_record)])
    bookings = [Booking(f"lent-{i}", vertices, 1) for i in range(5)]
    accepted = world.ledger.book(bookings).accepted
    world.ledger.rollback([booking for booking in bookings if booking.proc_id in accepted])
    return len(accepted)


def test_a_licence_is_not_lent_twice_while_nobody_has_counted_a_show_that_a_cuebot_handed_over(
    world: World, shared: str
) -> None:
    # given two of three frames of a licence in use by a show of Cuebot's
    flag(world, False)
    world.run(2)
    assert lent(world, shared) == 1

    # when a Cuebot hands the show over, then they are still in use: before it is counted, in the pause, and after
    flag(world, True)
    assert lent(world, shared) == 1
    shows = counted(world)
    assert not shows.admits(world.show.id)
    assert lent(world, shared) <= 1

    # and a frame that a Cuebot starts in the pause has the third
    world.run(1)
    assert lent(world, shared) == 0
    pause_is_over(world)
    assert shows.admits(world.show.id)
    assert lent(world, shared) == 0


def test_frames_that_ran_while_a_show_was_away_hold_their_licence_before_it_is_counted_again(
    world: World, shared: str
) -> None:
    assert counted(world, cuebots=False).admits(world.show.id)
    flag(world, False)
    world.run(3)
    flag(world, True)
    assert lent(world, shared) == 0


def test_a_show_that_books_nothing_is_counted_too_so_that_its_frames_hold_each_licence_once(
    world: World, shared: str
) -> None:
    flag(world, False)
    world.run(2)
    flag(world, True)
    shows = counted(world)
    shows.import_all()
    pause_is_over(world)
    shows.import_all()
    assert lent(world, shared) == 1
    commands = world.store.client.info("stats")["total_commands_processed"]
    shows.import_all()
    assert world.store.client.info("stats")["total_commands_processed"] == commands + 2, "the notes, and this look"


@contextmanager
def managed_by_another_process_meanwhile(world: World) -> Iterator[None]:
    """Right after the flags were read, which is what is asked first, the show is handed over and noted."""
    first = [True]

    def hand_over(*_: object) -> None:
        if first:
            first.clear()
            flag(world, True)
            note(world)

    with listening(world.engine, "after_cursor_execute", hand_over):
        yield


@pytest.mark.parametrize("noted_before", [False, True])
def test_a_show_that_is_handed_over_while_others_are_forgotten_is_imported(world: World, noted_before: bool) -> None:
    """A note of before is deleted, and written again by the import after it; no entry of the show goes."""
    world.run(2)
    counted(world, cuebots=False).import_all()
    running = world.store.ids()
    if not noted_before:
        world.store.client.delete(keys.IMPORTED)
    flag(world, False)
    with managed_by_another_process_meanwhile(world):
        followed = follow_handed_back(world.engine, world.ledger, age_seconds=AGE)
    assert followed == ([world.show.id] if noted_before else [])
    counted(world, cuebots=False).import_all()
    assert imported_shows(world.store.client).keys() == {world.show.id}
    assert world.store.ids() == running
    world.exact()


@pytest.fixture
def shows(world: World) -> list[str]:
    """Three managed shows with a proc each, that nobody has counted."""
    world.run(1)
    with world.engine.begin() as connection:
        farm = Farm(connection)
        others = [farm.show(name) for name in ("second", "third")]
        for show in others:
            farm.subscription(show, farm.alloc("general"), size=100)
            farm.run(farm.job([LayerSpec(frames=1)], show=show, name=f"{show.name}-job").frames, world.host)
    return [world.show.id, *(show.id for show in others)]


@pytest.mark.parametrize("bad", [0, 1, 2])
@pytest.mark.parametrize(
    "error",
    [InvalidInput("a row nobody understands"), DataError("SELECT", {}, Exception("out of range"))],
    ids=["row", "statement"],
)
def test_a_show_that_cannot_be_counted_does_not_keep_others_from_it(
    world: World, shows: list[str], bad: int, error: Exception
) -> None:
    def fail() -> None:
        raise error

    with listening(world.engine, "before_cursor_execute", naming(shows[bad], fail)), capture_logs() as said:
        counted(world, cuebots=False).import_all()
    assert [line["show"] for line in said if line["event"] == "show_not_imported"] == [shows[bad]]
    good = {show for show in shows if show != shows[bad]}
    assert set(imported_shows(world.store.client)) == good
    assert {record.show_id for record in world.ledger.records()} == good

    # and it is tried again
    counted(world, cuebots=False).import_all()
    assert set(imported_shows(world.store.client)) == set(shows)
    world.exact()


def test_a_store_that_is_lost_is_no_fault_of_a_show(world: World, shows: list[str]) -> None:
    tried: list[str] = []

    def fail(*seen: object) -> None:
        if named := [show for show in shows if show in str(seen[3])]:
            tried.extend(named)
            raise OperationalError("SELECT", {}, Exception("server closed the connection unexpectedly"))

    with listening(world.engine, "before_cursor_execute", fail), pytest.raises(OperationalError):
        counted(world).import_all()
    assert len(tried) == 1
    assert len(shows) == 3
