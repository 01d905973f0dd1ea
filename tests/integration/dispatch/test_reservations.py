"""The reservation task: what it grants, renews and ends, and what becomes of it when it dies."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine, text

from opencue_sched.dispatch.reservations import keep_reservations
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.errors import FencedOff
from opencue_sched.placement.policies.reservations import LONGEST_ELAPSED_SECONDS, RESERVATION_SECONDS
from opencue_sched.settings import Settings
from opencue_sched.store import reservations as store
from opencue_sched.store.fences import PersistentFences
from opencue_sched.store.hosts import fetch_hosts_by_id
from opencue_sched.store.schema import check_schema
from tests.kit.gathering import counted_statements, live_use
from tests.kit.limits import has_types, report_held, set_type
from tests.kit.statements import rows_read
from tests.kit.wide_farm import WideFarm, with_queue


@pytest.fixture
def farm(engine: Engine, settings: Settings) -> WideFarm:
    return WideFarm.made(engine, settings)


def test_a_wide_layer_is_blocked_while_it_waits_and_a_narrow_one_never(farm: WideFarm) -> None:
    farm.keep()
    assert farm.blocked_seconds() == 0
    assert farm.blocked_seconds(farm.narrow) is None
    farm.execute("UPDATE opencue_sched_blocked SET seen = seen - interval '5 seconds'")
    farm.keep()
    assert 5 <= (farm.blocked_seconds() or 0) < 5 + LONGEST_ELAPSED_SECONDS
    farm.blocked(100)
    farm.execute("UPDATE opencue_sched_blocked SET seen = seen - interval '1 hour'")
    farm.keep()
    assert farm.blocked_seconds() == 100 + LONGEST_ELAPSED_SECONDS, "no task looked"


def test_what_jobs_without_a_wide_layer_run_is_not_read(farm: WideFarm, engine: Engine) -> None:
    with engine.begin() as connection:
        host = Farm(connection).host(name="large", cores=40, memory_gb=600)
    rows = []
    for frames in (0, 400):
        if frames:
            with engine.begin() as connection:
                busy = Farm(connection)
                busy.run(busy.job([LayerSpec(frames=frames)]).frames, host, cores=0.1)
        # Cuebot's triggers wrote the counters of the layer for each frame: what they left in the indexes is no run.
        with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
            connection.execute(text("VACUUM layer_stat"))
        with rows_read(engine) as read:
            farm.keep()
        rows.append(sum(read))
    assert rows[1] - rows[0] < 100


def test_blocked_seconds_halve_when_a_frame_was_placed_whether_or_not_it_runs_still(farm: WideFarm) -> None:
    farm.blocked(100)
    farm.drained(farm.hosts[0])
    (frame,) = farm.rows("SELECT pk_frame FROM frame WHERE pk_layer = :layer LIMIT 1", layer=farm.wide)
    farm.fill(farm.hosts[0], [frame.pk_frame], cores=12)
    farm.drained(farm.hosts[0])
    farm.keep()
    assert farm.blocked_seconds() == 50


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job_resource SET int_max_cores = 1100 WHERE pk_job = :job",
        "UPDATE folder_resource SET int_max_cores = 1100",
        "UPDATE subscription SET int_burst = 6400 + 1100",
        "INSERT INTO limit_record VALUES ('full', 'full', 0, false);"
        "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES ('x', :wide, 'full')",
    ],
)
def test_demand_that_a_cap_keeps_waiting_is_blocked_no_longer_and_loses_its_host(
    farm: WideFarm, statement: str
) -> None:
    farm.asks()
    assert farm.reservations()
    farm.execute(statement, job=farm.job, wide=farm.wide)
    before = farm.blocked_seconds()
    farm.execute("UPDATE opencue_sched_blocked SET seen = seen - interval '5 seconds'")
    farm.keep()
    assert farm.blocked_seconds() == before
    assert not farm.reservations()


@pytest.mark.parametrize(
    ("most", "terms", "drains"),
    [
        (4, "", False),
        (5, "", True),
        (9, "int_soft_value = 4", False),
        (4, "str_enforcement = 'ADVISORY'", True),
        (5, "ts_reported = now()", False),
        (5, "ts_reported = now() - interval '1 hour', int_report_ttl = 60", True),
    ],
)
def test_no_host_drains_for_a_layer_that_can_get_no_seat(farm: WideFarm, most: int, terms: str, drains: bool) -> None:
    # Given a limit that all four hosts hold, and by a licence server's report an artist's machine
    with farm.engine.begin() as connection:
        if terms and not has_types(connection):
            pytest.skip("no such terms before V49")
        limit = Farm(connection).limit("houdini", most)
        set_type(connection, limit, "HOST")
        if terms:
            connection.execute(text(f"UPDATE limit_record SET {terms}"))  # noqa: S608 - our own constants
            report_held(connection, limit, "artist7")
    farm.execute(
        "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record) VALUES ('n', :narrow, :limit),"
        " ('w', :wide, :limit)",
        narrow=farm.narrow,
        wide=farm.wide,
        limit=limit,
    )
    # when the wide layer under it has waited for long, then a host drains for it only where one more may hold it
    farm.asks()
    assert bool(farm.reservations()) == drains


def test_the_host_that_is_expected_free_first_drains_for_a_layer_past_the_block_time(farm: WideFarm) -> None:
    # Given frames of ten minutes everywhere, begun a minute ago, but on one host two minutes earlier
    farm.history(farm.narrow, 600)
    farm.execute(
        "UPDATE frame SET ts_started = ts_started - interval '2 minutes' FROM proc p"
        " WHERE p.pk_frame = frame.pk_frame AND p.pk_host = :host",
        host=farm.hosts[2],
    )
    farm.blocked(299)
    # when the layer passes the block time
    assert not farm.reservations()
    farm.execute("UPDATE opencue_sched_blocked SET seen = seen - interval '5 seconds'")
    report = farm.keep()
    # then that one drains, for as long as that takes.
    assert list(report.granted) == [farm.hosts[2]]
    reservation = farm.reservations()[farm.hosts[2]]
    assert (reservation.pk_layer, reservation.pk_job, reservation.cores, reservation.gpus) == (
        farm.wide,
        farm.job,
        12,
        0,
    )
    assert 360 < reservation.free_in <= 420
    assert RESERVATION_SECONDS - 60 < reservation.lives <= RESERVATION_SECONDS


def test_no_host_drains_for_a_second_frame_before_another_block_time_has_passed(farm: WideFarm) -> None:
    farm.asks()
    farm.keep()
    assert len(farm.reservations()) == 1
    farm.blocked(2 * farm.settings.queue.reservation_block_time)
    farm.keep()
    assert len(farm.reservations()) == 2
    farm.blocked(4 * farm.settings.queue.reservation_block_time)
    farm.keep()
    assert len(farm.reservations()) == 2, "half of the hosts"


def test_one_host_alone_is_never_held(engine: Engine, settings: Settings) -> None:
    farm = WideFarm.made(engine, settings, hosts=1)
    farm.asks()
    assert not farm.reservations()


def test_who_reads_hosts_sees_for_which_layers_they_are_reserved(farm: WideFarm) -> None:
    (reserved,) = farm.asks().granted
    with farm.engine.connect() as connection:
        hosts = {host.id: host.reservation for host in fetch_hosts_by_id(connection, farm.hosts, 3600)}
    reservation = hosts.pop(reserved)
    assert reservation is not None
    assert (reservation.layer_id, reservation.cores, reservation.owner) == (farm.wide, 12, "waits/wide")
    assert set(hosts.values()) == {None}


def test_a_reservation_is_renewed_with_what_is_expected_now(farm: WideFarm) -> None:
    (reserved,) = farm.asks().granted
    assert farm.reservations()[reserved].free_in is None
    farm.history(farm.narrow, 600)
    farm.execute("UPDATE opencue_sched_hold SET until = until - interval '500 seconds'")
    report = farm.keep()
    assert report.renewed == {reserved}
    assert RESERVATION_SECONDS - 60 < farm.reservations()[reserved].lives <= RESERVATION_SECONDS
    assert 480 < farm.reservations()[reserved].free_in <= 540


@pytest.mark.parametrize(
    "statement",
    [
        "UPDATE job SET b_paused = true WHERE pk_job = :job",
        "UPDATE frame SET str_state = 'EATEN' WHERE pk_layer = :wide",
        "UPDATE host_stat SET str_state = 'DOWN' WHERE pk_host = :host",
        "UPDATE host SET str_lock_state = 'LOCKED' WHERE pk_host = :host",
        "UPDATE layer SET int_cores_min = 400 WHERE pk_layer = :wide",
        "UPDATE opencue_sched_hold SET until = clock_timestamp()",
        "UPDATE opencue_sched_hold SET pk_layer = 'gone'",
    ],
)
def test_a_reservation_ends_when_its_demand_is_gone(farm: WideFarm, statement: str) -> None:
    (reserved,) = farm.asks().granted
    farm.execute(statement, job=farm.job, wide=farm.wide, host=reserved)
    farm.execute("UPDATE opencue_sched_blocked SET seconds = 0")
    report = farm.keep()
    assert report.ended == {reserved}
    assert not farm.reservations()
    assert report.changed == {reserved}


def test_switched_off_it_grants_nothing_and_ends_what_there_is(farm: WideFarm) -> None:
    (reserved,) = farm.asks().granted
    farm.settings = with_queue(farm.settings, reservations=False)
    assert farm.keep().ended == {reserved}
    assert not farm.reservations()
    assert farm.blocked_seconds() is None
    assert not farm.keep().changed


def test_a_deleted_job_leaves_nothing_and_its_rows_can_be_deleted(farm: WideFarm) -> None:
    (reserved,) = farm.asks().granted
    farm.execute("DELETE FROM frame WHERE pk_layer = :wide", wide=farm.wide)
    farm.execute("DELETE FROM layer WHERE pk_layer = :wide", wide=farm.wide)
    with farm.engine.connect() as connection:
        (host,) = fetch_hosts_by_id(connection, [reserved], 3600)
    assert host.reservation is None, "at once"
    assert farm.keep().ended == {reserved}
    assert farm.blocked_seconds() is None


def test_a_locked_host_is_not_waited_for_and_not_held(farm: WideFarm) -> None:
    farm.blocked(farm.settings.queue.reservation_block_time)
    with farm.engine.begin() as booking:
        booking.execute(text("SELECT FROM host FOR NO KEY UPDATE"))
        assert not farm.keep().granted
    assert farm.keep().granted


def test_a_reservation_that_a_booking_is_about_to_use_stays(farm: WideFarm) -> None:
    farm.asks()
    farm.settings = with_queue(farm.settings, reservations=False)
    with farm.engine.begin() as booking:
        booking.execute(text("DELETE FROM opencue_sched_hold"))
        assert not farm.keep().ended


def test_two_processes_do_not_both_do_the_reservation_task(farm: WideFarm) -> None:
    with farm.engine.begin() as other:
        assert store.begin_task(other, "") is not None
        assert not farm.keep().kept
    assert farm.keep().kept


def test_the_task_of_a_former_leader_changes_nothing(farm: WideFarm) -> None:
    fences = PersistentFences(farm.engine)
    fences.claim("cue:beat", 7)
    farm.keep(role="cue:beat", fence=7)
    farm.blocked(1000)
    fences.claim("cue:beat", 8)
    with pytest.raises(FencedOff, match=r"\b7\b.*\b8\b"):
        farm.keep(role="cue:beat", fence=7)
    assert not farm.reservations()
    assert farm.keep(role="cue:beat", fence=8).granted


@pytest.mark.parametrize("off", ["UPDATE layer_stat SET int_waiting_count = 0", "UPDATE job SET b_paused = true"])
def test_where_nothing_waits_or_is_held_it_asks_for_just_that(engine: Engine, settings: Settings, off: str) -> None:
    farm = WideFarm.made(engine, settings, hosts=3)
    farm.execute(off)
    with engine.connect() as connection:
        facts = check_schema(connection)
    with counted_statements(engine) as statements:
        keep_reservations(engine, settings, facts, lambda _: live_use(engine))
    assert len(statements) == 1, statements


def test_where_nothing_waits_any_more_reservations_end_and_blocked_seconds_are_forgotten(farm: WideFarm) -> None:
    farm.asks()
    reserved = frozenset(farm.reservations())
    farm.execute("UPDATE layer_stat SET int_waiting_count = 0")
    assert reserved
    assert farm.keep().ended == reserved
    assert farm.blocked_seconds() is None

    # and blocked seconds alone, with no host reserved
    farm.execute("INSERT INTO opencue_sched_blocked SELECT :wide, 100, 3, clock_timestamp()", wide=farm.wide)
    farm.keep()
    assert farm.blocked_seconds() is None


def test_its_statements_do_not_grow_with_the_farm(engine: Engine, settings: Settings) -> None:
    farm = WideFarm.made(engine, settings, hosts=3)
    farm.blocked(300)
    with counted_statements(engine) as few:
        farm.keep()
    with engine.begin() as connection:
        more = Farm(connection)
        for number in range(12):
            more.host(name=f"more{number}", cores=16, memory_gb=64)
            more.job([LayerSpec(frames=3, cores=12), LayerSpec(frames=2, cores=16)], name=f"more{number}")
    farm.keep()
    farm.execute("UPDATE opencue_sched_blocked SET seconds = 1000")
    with counted_statements(engine) as many:
        assert len(farm.keep().granted) > 5
    assert len(many) == len(few)
