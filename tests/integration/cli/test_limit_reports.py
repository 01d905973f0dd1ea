"""``limit report``: what licence servers say of who holds their licences, where no Cuebot takes it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.errors import SchedulerError
from opencue_sched.reports.limit_reports import MOST_PROBLEMS, Holder, report_limits
from tests.kit.command import Cli
from tests.kit.polling import eventually
from tests.kit.wording import lacks

pytestmark = pytest.mark.without_cuebot(
    "it takes the reports of licence servers itself, and before V49 has no table of them"
)

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

HELD = "SELECT str_name, str_host_name, str_reported_name, int_tokens, str_user FROM limit_host"
HELD += " JOIN limit_record USING (pk_limit_record) ORDER BY 1, 2"
TWO = '{"host": "WS017.farm.example", "tokens": 2, "user": "alice"}\n\n{"host": "r01"}\n'


@pytest.fixture(autouse=True)
def limits(build: Build) -> None:
    """Two limits."""
    build(lambda farm: [farm.limit(name, 30) for name in ("houdini", "nuke")])


def ago(seconds: float, now: datetime | None = None) -> str:
    return ((now or datetime.now(UTC)) - timedelta(seconds=seconds)).isoformat()


def test_a_report_is_who_holds_the_limit_and_nobody_else(cli: Cli, rows: Rows) -> None:
    # given a limit that was reported of three machines, and one of another limit
    first = '{"host": "r01"}\n{"host": "r02"}\n{"host": "r03", "user": "bob"}\n'
    assert cli("limit", "report", "nuke", "--asked-at", ago(60), given=first).status == 0
    cli("limit", "report", "houdini", given='{"host": "r01", "tokens": 7}')
    kept = "SELECT pk_limit_host FROM limit_host WHERE str_host_name = 'r01' AND int_tokens = 1"
    before = rows(kept)

    # when the licence server names others
    said = cli("limit", "report", "nuke", "--source", "rlm@lic01", given=TWO)

    # then these hold it, by names without case and domain, and the row of who held it already is as it was
    assert (said.status, lacks(said.out, "nuke: ", "2 machines", "3 licences"), said.err) == (0, [], "")
    assert rows(HELD) == [
        ("houdini", "r01", "r01", 7, None),
        ("nuke", "r01", "r01", 1, None),
        ("nuke", "ws017", "WS017.farm.example", 2, "alice"),
    ]
    assert rows(kept) == before
    ((source, age),) = rows(
        "SELECT str_report_source, clock_timestamp() - ts_reported FROM limit_record WHERE str_name = 'nuke'"
    )
    assert (source, age < timedelta(seconds=30)) == ("rlm@lic01", True)


def test_several_limits_are_named_line_by_line(cli: Cli, rows: Rows) -> None:
    lines = '{"limit": "nuke", "host": "r01"}\n{"limit": "houdini", "host": "r02", "tokens": 3}\n'
    said = cli("limit", "report", "--json", given=lines)
    assert [(report["limit"], report["outcome"], report["tokens"]) for report in said.json] == [
        ("nuke", "taken", 1),
        ("houdini", "taken", 3),
    ]
    assert [(limit, host) for limit, host, *_ in rows(HELD)] == [("houdini", "r02"), ("nuke", "r01")]


def test_a_file_is_read_and_addresses_stay_whole(cli: Cli, rows: Rows, tmp_path: Any) -> None:
    """Names that are equal without case and domain are one machine, with the most tokens of them."""
    hosts = ("10.0.0.1", "10.0.0.2", "FE80::1", "r01.a.example", "R01.b.example", " r01 ")
    tokens = {"R01.b.example": 4}
    lines = [f'{{"host": "{host}", "tokens": {tokens.get(host, 1)}}}' for host in hosts]
    (tmp_path / "holders.jsonl").write_text("\n".join(lines))
    assert cli("limit", "report", "nuke", "--file", str(tmp_path / "holders.jsonl")).status == 0
    found = [(host, reported, count) for _, host, reported, count, _ in rows(HELD)]
    assert found == [
        ("10.0.0.1", "10.0.0.1", 1),
        ("10.0.0.2", "10.0.0.2", 1),
        ("fe80::1", "FE80::1", 1),
        ("r01", "R01.b.example", 4),
    ]


def test_nobody_holds_a_limit_only_where_that_is_said(cli: Cli, rows: Rows) -> None:
    # given a limit that two machines hold
    cli("limit", "report", "nuke", "--asked-at", ago(60), given=TWO)
    # when a report is empty, then it is refused and they hold it still
    for empty in ("", "\n \n"):
        refused = cli("limit", "report", "nuke", given=empty)
        assert refused.status == 1
        assert "--nobody" in refused.err
    assert len(rows(HELD)) == 2
    # when nobody is said to, nobody does
    said = cli("limit", "report", "nuke", "--nobody")
    assert (said.status, "nuke" in said.out, rows(HELD)) == (0, True, [])
    assert cli("limit", "report", "--nobody").status == 2
    assert cli("limit", "report", "nuke", "--nobody", "--file", "-").status == 2


def test_what_is_late_early_or_unknown_is_told_and_left_out(cli: Cli, rows: Rows) -> None:
    # given a limit that was reported a minute ago
    now = datetime.now(UTC)
    cli("limit", "report", "nuke", "--asked-at", ago(60, now), given='{"host": "r01"}')
    # when reports come that were asked for before it, just after it, and of a limit that is not there
    for seconds in (90, 57):
        said = cli("limit", "report", "nuke", "--asked-at", ago(seconds, now), given='{"host": "r02"}')
        assert (said.status, said.out, "nuke" in said.err) == (0, "", True)
        assert ("5 s" in said.err) == (seconds == 57), "too soon after the last report, not before it"
    lines = '{"limit": "nuke", "host": "r03"}\n{"limit": "nuek", "host": "r04"}'
    said = cli("limit", "report", given=lines)
    # then they are told of, and what is neither is taken
    assert (said.status, lacks(said.err, "note: ", "'nuek'", "'nuke'")) == (0, [])
    assert [(limit, host) for limit, host, *_ in rows(HELD)] == [("nuke", "r03")]


def test_a_clock_that_is_ahead_keeps_no_later_report_out(cli: Cli, rows: Rows) -> None:
    cli("limit", "report", "nuke", "--asked-at", "2098-12-24T18:00:00Z", given='{"host": "r01"}')
    assert rows("SELECT count(*) FROM limit_record WHERE ts_reported > clock_timestamp()") == [(0,)]


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("hold", ["JSON"]),
        ("[1]", ["object"]),
        ("{}", ["host"]),
        ('{"host": "r01", "token": 1}', ["'token'", "'tokens'"]),
        ('{"host": "r01", "tokens": 0}', ["tokens", "0"]),
        ('{"host": "r01", "tokens": true}', ["tokens", "0"]),
        ('{"host": "r01", "tokens": 9999999999}', ["tokens", "0"]),
        ('{"host": " "}', ["host"]),
        ('{"host": ".farm.example"}', ["host", "domain"]),
        ('{"host": "r01\\u0000"}', ["host", "characters"]),
        ('{"host": "r01", "user": 7}', ["user"]),
        ('{"host": "%s"}' % ("r" * 257), ["host", "256"]),
        ('{"host": "r01", "limit": "houdini"}', ["limit"]),
    ],
)
def test_one_line_that_is_wrong_is_enough_to_write_nothing(cli: Cli, rows: Rows, line: str, problem: list[str]) -> None:
    refused = cli("limit", "report", "nuke", given=f'{{"host": "r02"}}\n{line}\n')
    assert refused.status == 1
    assert not lacks(refused.err, "line 2: ", *problem)
    assert rows(HELD) == []
    assert rows("SELECT count(*) FROM limit_record WHERE ts_reported IS NOT NULL") == [(0,)]


def test_a_report_of_another_format_is_read_no_further_than_its_first_problems(cli: Cli, rows: Rows) -> None:
    refused = cli("limit", "report", "nuke", given="ws017 1 alice\n" * 10_000)
    assert (refused.status, rows(HELD)) == (1, [])
    assert len(refused.err.splitlines()) == MOST_PROBLEMS + 1
    assert "line 1: " in refused.err


def test_moments_are_told_with_their_day(cli: Cli) -> None:
    refused = cli("limit", "report", "nuke", "--asked-at", "18:00", given=TWO)
    assert refused.status == 2
    assert "2026-12-24T18:00:05" in refused.err


def test_of_two_reports_at_once_the_later_answer_wins(engine: Engine, rows: Rows) -> None:
    # given a report that has begun to write, and another one, of an earlier answer, that waits for it
    now = datetime.now(UTC)
    outcomes: list[str] = []

    def report_earlier() -> None:
        (said,) = report_limits(engine, {"nuke": [Holder("r01")]}, asked_at=now - timedelta(seconds=30))
        outcomes.append(said.outcome)

    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with engine.begin() as connection:
        connection.execute(text("UPDATE limit_record SET ts_reported = :now WHERE str_name = 'nuke'"), {"now": now})
        earlier = threading.Thread(target=report_earlier)
        earlier.start()
        eventually(lambda: rows(waiting) == [(1,)])
    earlier.join()
    # then the earlier answer is late
    assert (outcomes, rows(HELD)) == (["late"], [])


@pytest.mark.parametrize(("drops", "says"), [(False, "Cuebot"), (True, "V49")])
def test_beside_a_cuebot_nothing_is_written(engine: Engine, rows: Rows, drops: bool, says: str) -> None:
    with engine.begin() as connection:
        connection.execute(text("UPDATE opencue_sched_origin SET origin = 'cuebot'"))
        if drops:
            connection.execute(text("DROP TABLE limit_host"))
    with pytest.raises(SchedulerError, match=says):
        report_limits(engine, {"nuke": [Holder("r01")]}, asked_at=datetime.now(UTC))
    assert rows("SELECT count(*) FROM limit_record WHERE ts_reported IS NOT NULL") == [(0,)]
