"""Status reports of many hosts, handled together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from opencue_proto import report_pb2
from sqlalchemy import Engine, text

from opencue_sched.clients.postgres import reading
from opencue_sched.clients.store_errors import describe
from opencue_sched.embedded.farms.farm_specs import HostIds, LayerSpec
from opencue_sched.errors import InvalidInput
from opencue_sched.reports import host_reports as reports_module
from opencue_sched.reports.host_reports import OLDEST_FOR_VERIFICATION_SECONDS, StatusReport
from opencue_sched.store.reported_runs import UNCHANGED_SECONDS
from tests.integration.reports.test_host_reports import Desk, age_procs
from tests.kit.reported_hosts import GB, render_host
from tests.kit.runs import FarmView
from tests.kit.statements import listening, rows_read


@pytest.fixture
def desk(engine: Engine) -> Desk:
    return Desk(engine)


@dataclass(frozen=True)
class Crowd:
    """Hosts that run some frames of one job each."""

    hosts: Sequence[HostIds]
    runs: Sequence[Sequence[tuple[str, str]]]
    """Of each host, (proc, frame)."""

    def reports(self, **frame: Any) -> list[report_pb2.HostReport]:
        return [self.report(place, **frame) for place in range(len(self.hosts))]

    def report(self, place: int, **frame: Any) -> report_pb2.HostReport:
        numbers = {"rss": 100_000, "max_rss": 200_000, "llu_time": 1_900_000_000, **frame}
        return report_pb2.HostReport(
            host=render_host(name=self.hosts[place].name, cores_per_proc=1600, total_mem=64 * GB, free_mem=32 * GB),
            frames=[
                report_pb2.RunningFrameInfo(resource_id=proc, frame_id=frame_id, **numbers)
                for proc, frame_id in self.runs[place]
            ],
        )


def crowd(view: FarmView, hosts: int, *, frames: int = 1) -> Crowd:
    with view.farm() as farm:
        made = [farm.host(cores=16, memory_gb=64) for _ in range(hosts)]
        job = farm.job([LayerSpec(frames=hosts * frames, memory_gb=1)])
        runs = []
        for place, host in enumerate(made):
            here = job.frames[place * frames : (place + 1) * frames]
            runs.append(list(zip(farm.run(here, host, cores=1, memory_gb=1), here, strict=True)))
    age_procs(view)
    view.run_sql("UPDATE proc SET ts_ping = host_stat.ts_ping FROM host_stat WHERE host_stat.pk_host = proc.pk_host")
    return Crowd(made, runs)


def pinged(view: FarmView) -> set[str]:
    """The hosts whose last report has just come, and whose procs all have the ping of their host."""
    rows = view.rows(
        """
        SELECT host.str_name, host_stat.ts_ping > now() - interval '30 seconds' AS fresh,
               bool_and(proc.ts_ping = host_stat.ts_ping) AS together
          FROM host JOIN host_stat USING (pk_host) JOIN proc USING (pk_host) GROUP BY 1, 2
        """
    )
    return {row.str_name for row in rows if row.fresh and row.together}


def test_one_bad_report_among_forty_costs_only_itself(view: FarmView, desk: Desk) -> None:
    # given forty hosts, of which PostgreSQL refuses the numbers of one, and another reports nonsense
    farm = crowd(view, 40)
    view.run_sql(
        f"""
        CREATE FUNCTION refuse_one() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF NEW.pk_host = '{farm.hosts[17].id}' THEN RAISE EXCEPTION 'not this one'; END IF;
            RETURN NEW;
        END $$;
        CREATE TRIGGER refuse_one BEFORE UPDATE ON host_stat FOR EACH ROW EXECUTE FUNCTION refuse_one();
        """
    )
    reports = farm.reports()
    reports[5].host.num_procs = 0
    # when their reports are handled together
    try:
        outcomes = desk.statuses(reports)
    finally:
        view.run_sql("DROP TRIGGER refuse_one ON host_stat; DROP FUNCTION refuse_one()")
    # then these two failed, each for its own reason, and all the others were written
    errors = {place: outcome.error for place, outcome in enumerate(outcomes) if outcome.error is not None}
    assert sorted(errors) == [5, 17]
    assert isinstance(errors[5], InvalidInput)
    assert "not this one" in describe(errors[17])
    assert pinged(view) == {host.name for place, host in enumerate(farm.hosts) if place not in errors}
    assert view.one("SELECT count(*) AS n FROM frame WHERE int_mem_used = 100000").n == 38


@pytest.mark.parametrize("widened", ["layer ALTER int_timeout TYPE bigint", "host ALTER int_procs TYPE bigint"])
def test_a_column_that_is_widened_between_two_reports_costs_none(view: FarmView, desk: Desk, widened: str) -> None:
    # given hosts whose reports have been handled, by statements that PostgreSQL keeps planned
    farm = crowd(view, 3)
    assert [outcome.error for outcome in desk.statuses(farm.reports())] == [None] * 3
    # when an upgrade gives the answers other types
    view.run_sql(f"ALTER TABLE {widened}")
    view.run_sql("UPDATE host_stat SET ts_ping = now() - interval '1 minute'")
    outcomes = desk.statuses(farm.reports(rss=150_000))
    # then each is handled
    assert [outcome.error for outcome in outcomes] == [None] * 3
    assert pinged(view) == {host.name for host in farm.hosts}
    assert view.one("SELECT count(*) AS n FROM frame WHERE int_mem_used = 150000").n == 3


def test_a_report_that_waited_too_long_kills_nothing_though_others_beside_it_do(view: FarmView, desk: Desk) -> None:
    # given three hosts with a process each that nobody owns, whose reports have waited for different times
    farm = crowd(view, 3)
    view.run_sql("DELETE FROM proc")
    view.run_sql("UPDATE frame SET str_state = 'WAITING', ts_updated = now() - interval '1 minute'")
    now, oldest = reports_module.monotonic(), OLDEST_FOR_VERIFICATION_SECONDS
    ages = [0.0, oldest + 0.5, oldest - 2.0]
    reports = [StatusReport(report, now - age) for report, age in zip(farm.reports(), ages, strict=True)]
    # when they are handled together
    outcomes = desk.reports.statuses(reports)
    # then the one that is too old brings numbers alone
    assert [outcome.kill is not None for outcome in outcomes] == [True, False, True]
    assert view.one("SELECT count(*) AS n FROM host_stat WHERE ts_ping > now() - interval '30 seconds'").n == 3


def test_pings_are_written_each_time_and_nothing_else_that_is_as_it_was(view: FarmView, desk: Desk) -> None:
    farm = crowd(view, 3, frames=2)
    tables = ("frame", "proc", "host_stat", "host", "layer_mem", "job_mem", "layer", "opencue_sched_frame_memory")

    def written(seen: dict[str, dict[str, str]], reports: Sequence[report_pb2.HostReport]) -> dict[str, int]:
        """How many rows of each table the reports write."""
        for outcome in desk.statuses(reports):
            assert outcome.error is None
        counts = {}
        for table in tables:
            rows = view.rows(f"SELECT ctid, xmin::text AS version FROM {table}")  # noqa: S608
            now = {str(row.ctid): row.version for row in rows}
            if changed := len(now.items() - seen.get(table, {}).items()):
                counts[table] = changed
            seen[table] = now
        return counts

    seen: dict[str, dict[str, str]] = {}
    needs_more = 2 * GB
    written(seen, farm.reports(max_rss=needs_more))
    # when they report the same again, then there are the pings, and those of host and procs are one
    assert written(seen, farm.reports(max_rss=needs_more)) == {"proc": 6, "host_stat": 3}
    assert pinged(view) == {host.name for host in farm.hosts}
    # when the memory of one host's frames moves, then these are written
    moved = [farm.report(0, rss=120_000, max_rss=needs_more), *farm.reports(max_rss=needs_more)[1:]]
    assert written(seen, moved) == {"frame": 2, "proc": 6, "host_stat": 3}
    # when only the log of frames grows, then these are
    grown = [*moved[:2], farm.report(2, max_rss=needs_more, llu_time=1_900_000_001)]
    assert written(seen, grown) == {"frame": 2, "proc": 6, "host_stat": 3}
    # and a frame of which nothing was new for long shows that it was still there
    view.run_sql("UPDATE frame SET ts_updated = now() - :long * interval '1 second'", long=UNCHANGED_SECONDS + 1)
    written({}, [])
    desk.statuses(grown)
    assert view.one("SELECT count(*) AS n FROM frame WHERE ts_updated > now() - interval '30 seconds'").n == 6


def test_the_same_statements_for_any_number_of_hosts(view: FarmView, desk: Desk, engine: Engine) -> None:
    # given hosts whose frames need more memory than they have
    farm = crowd(view, 40, frames=2)
    counts = []
    for number, hosts in enumerate((1, 40)):
        reports = farm.reports(rss=2 * GB + number, max_rss=2 * GB + number)[-hosts:]
        # when one of them reports, and when all do
        sent: list[str] = []
        with listening(engine, "before_cursor_execute", lambda *sends: sent.append(sends[2])):  # noqa: B023
            assert all(outcome.error is None for outcome in desk.statuses(reports))
        counts.append(len(sent))
    # then as many statements are sent
    assert counts[0] == counts[1] <= 15
    assert view.one("SELECT count(*) AS n FROM proc WHERE int_mem_reserved = :kb", kb=2 * GB + 1).n == 80
    view.assert_consistent()


def rows_read_for(engine: Engine, desk: Desk, reports: Sequence[report_pb2.HostReport]) -> int:
    with rows_read(engine) as read:
        assert all(outcome.error is None for outcome in desk.statuses(reports))
    return sum(read)


def test_what_is_read_for_reports_does_not_grow_with_the_farm(view: FarmView, desk: Desk, engine: Engine) -> None:
    # given twenty hosts that report, beside as many frames again, and then four times as many, that run elsewhere
    farm = crowd(view, 20, frames=8)
    read = []
    for others in (160, 640):
        with view.farm() as more:
            more.job([LayerSpec(frames=others)], show=more.show(f"others{others}"), name=f"others{others}")
        view.run_sql("UPDATE frame SET str_state = 'RUNNING' WHERE str_state = 'WAITING'")
        with reading(engine) as connection:
            connection.execute(text("VACUUM ANALYZE"))  # entries of older versions would be read as well
        # when they report
        read.append(rows_read_for(engine, desk, farm.reports(rss=100_000 + others)))
    # then no more is read for it
    assert read[1] <= 1.2 * read[0]


def test_what_is_read_for_reports_does_not_grow_with_frames_that_began_since_tables_were_analysed(
    view: FarmView, desk: Desk, engine: Engine
) -> None:
    # given a farm that PostgreSQL analysed while nothing ran
    with view.farm() as other:
        other.job([LayerSpec(frames=1600)], name="other")
    with reading(engine) as connection:
        connection.execute(text("VACUUM ANALYZE"))
    # when all is started, and two hosts report
    farm = crowd(view, 2, frames=2)
    view.run_sql("UPDATE frame SET str_state = 'RUNNING' WHERE str_state = 'WAITING'")
    # then what they run is read by its ids
    assert rows_read_for(engine, desk, farm.reports(rss=100_000)) < 1600


def test_the_memory_of_each_host_goes_as_far_as_its_own(view: FarmView, desk: Desk) -> None:
    # given a host with enough for one of its two frames to grow, and one with enough for both
    farm = crowd(view, 2, frames=2)
    view.run_sql("UPDATE host SET int_mem_idle = :kb WHERE pk_host = :host", kb=2 * GB, host=farm.hosts[0].id)
    # when all grow
    outcomes = desk.statuses(farm.reports(rss=3 * GB))
    assert all(outcome.error is None for outcome in outcomes)
    reserved = {row.pk_proc: row.int_mem_reserved // GB for row in view.rows("SELECT * FROM proc")}
    assert [sorted(reserved[proc] for proc, _ in runs) for runs in farm.runs] == [[1, 3], [3, 3]]
    assert sorted(desk.changes.published) == sorted(host.id for host in farm.hosts)


def test_hosts_are_known_by_each_of_their_names_and_new_ones_are_made_beside_them(view: FarmView, desk: Desk) -> None:
    farm = crowd(view, 4)
    with view.farm() as more:
        more.alloc()
    for place, change in enumerate(("str_fqdn = 'a.farm'", "str_fqdn = NULL", "str_fqdn = 'C.Farm'")):
        view.run_sql(f"UPDATE host SET {change} WHERE pk_host = :host", host=farm.hosts[place].id)  # noqa: S608
    reports = farm.reports()
    reports[0].host.name = "a.farm"
    reports[1].host.name += ".studio.example"
    reports[2].host.name = "c.farm"
    reports.append(report_pb2.HostReport(host=render_host(name="quite-new.farm")))
    outcomes = desk.statuses(reports)
    assert [outcome.error for outcome in outcomes] == [None] * 5
    assert pinged(view) == {host.name for host in farm.hosts}
    assert len(view.rows("SELECT * FROM host")) == 5


class Killed(BaseException):
    """The end of the process that handles reports."""


def test_what_is_killed_between_two_statements_loses_nothing_that_the_next_report_does_not_bring(
    view: FarmView, desk: Desk, engine: Engine
) -> None:
    # given hosts whose frames need more memory than they have
    farm = crowd(view, 3, frames=2)
    killed = 0
    for last in range(100):
        reports = farm.reports(rss=(2 + last) * 1000 + GB, max_rss=(2 + last) * 1000 + GB)
        sent = 0

        def kill(*_: object, last: int = last) -> None:
            nonlocal sent
            sent += 1
            if sent > last:
                raise Killed

        # when the process is killed before one of the statements
        try:
            with listening(engine, "before_cursor_execute", kill):
                desk.statuses(reports)
        except Killed:
            killed += 1
        else:
            break
        # then pings of a host and its procs were written together or not
        apart = "SELECT FROM proc JOIN host_stat USING (pk_host) WHERE proc.ts_ping <> host_stat.ts_ping"
        assert view.rows(apart) == []
        # and the next report brings all of it
        assert all(outcome.error is None for outcome in desk.statuses(reports))
        peak = reports[0].frames[0].rss
        found = view.one(
            "SELECT count(*) AS n FROM frame JOIN proc USING (pk_frame)"
            " WHERE frame.int_mem_used = :kb AND proc.int_mem_used = :kb AND proc.int_mem_reserved = :kb",
            kb=peak,
        )
        assert (found.n, pinged(view)) == (6, {host.name for host in farm.hosts})
        view.assert_consistent()
    assert killed > 5


def test_rows_that_somebody_has_locked_hold_up_no_other_host(view: FarmView, desk: Desk, engine: Engine) -> None:
    # given hosts of which somebody has locked a host row, statistics, a proc and a frame, and a lock that is to change
    farm = crowd(view, 5)
    reports = farm.reports()
    reports[0].host.nimby_locked = True
    with engine.connect() as somebody:
        for table, column, row in (
            ("host", "pk_host", farm.hosts[0].id),
            ("host_stat", "pk_host", farm.hosts[1].id),
            ("proc", "pk_proc", farm.runs[2][0][0]),
            ("frame", "pk_frame", farm.runs[3][0][1]),
        ):
            somebody.execute(text(f"SELECT FROM {table} WHERE {column} = :row FOR UPDATE"), {"row": row})
        # when they report, then each other host is written, and what is locked is not
        outcomes = desk.statuses(reports)
        assert [outcome.error is None for outcome in outcomes] == [False, True, True, True, True]
        assert pinged(view) == {farm.hosts[3].name, farm.hosts[4].name}
        somebody.rollback()
    # and when nobody has locked anything any more, then all are
    assert all(outcome.error is None for outcome in desk.statuses(reports))
    assert pinged(view) == {host.name for host in farm.hosts}
    assert view.host(farm.hosts[0]).str_lock_state == "NIMBY_LOCKED"
