"""Limits by command: how much of them is in use by frames and by reports, who holds them, and what may be set."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from tests.kit.command import Cli
from tests.kit.limits import before_v49, has_types, report_held, set_type
from tests.kit.terminal import on_terminal
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

RUNNING = {"r01": 2, "r02": 1, "r03": 3}
"""Frames of the limit on each host; those on r02 and r03 started before and after the report, and the settle window."""


@pytest.fixture
def make(build: Build, engine: Engine) -> Callable[[str, str], None]:
    """Make a limit of a type: three machines run its frames, two are reported, r01 and an artist's, and the licence
    server was asked ten minutes ago."""
    with engine.connect() as connection:
        if not has_types(connection):
            pytest.skip("no reports before V49")

    def run(limit_type: str, terms: str = "") -> None:
        def make(farm: Farm) -> None:
            limit = farm.limit("nuke", 8)
            set_type(farm.connection, limit, limit_type)
            farm.connection.execute(
                text(f"UPDATE limit_record SET ts_reported = now() - interval '10 minutes' {terms}")  # noqa: S608
            )
            report_held(farm.connection, limit, "r01.farm.example", "ws017")
            farm.connection.execute(
                text("UPDATE limit_host SET int_tokens = 2, str_user = 'alice' WHERE str_host_name = 'ws017'")
            )
            show = farm.show()
            job = farm.job([LayerSpec(name="comp", frames=9, limits=[limit])], show=show, name="comp")
            frames = iter(job.frames)
            for name, count in RUNNING.items():
                host = farm.host(name=name)
                farm.run([next(frames) for _ in range(count)], host)
            farm.connection.execute(
                text(
                    "UPDATE proc SET ts_dispatched = now() - CASE str_name WHEN 'r02' THEN interval '13 minutes'"
                    " ELSE interval '11 minutes' END FROM host WHERE host.pk_host = proc.pk_host"
                )
            )

        build(make)

    return run


def test_of_a_limit_of_machines_each_counts_once_and_those_whose_seat_is_given_back_do_not(cli: Cli, make: Any) -> None:
    make("HOST")
    listed = cli("limit", "list", "--json")
    assert listed.status == 0, listed.err
    (row,) = listed.json
    figures = {key: row[key] for key in ("running", "settled", "pending", "left", "frames", "machines", "open")}
    # r01 and the artist are reported, r03 started since; r02 gave its seat back, but still holds it
    assert figures == {"running": 3, "settled": 2, "pending": 1, "left": 5, "frames": 6, "machines": 4, "open": ""}
    assert cli("limit", "list").words[1] == ["nuke", "3", "8", "5", "machines", "2", "1", "10m"]


def test_a_reported_machine_counts_once_also_where_two_rows_of_a_host_have_its_name(
    cli: Cli, make: Any, engine: Engine
) -> None:
    # given a machine that is reported and runs frames that started since, under a name with a domain and one without
    make("HOST")
    with engine.begin() as connection:
        connection.execute(text("UPDATE host SET str_name = 'R01.other.example' WHERE str_name = 'r03'"))
    (row,) = cli("limit", "list", "--json").json
    assert (row["running"], row["settled"], row["pending"]) == (2, 2, 0)


def test_of_a_limit_of_frames_licences_count_and_what_started_since(cli: Cli, make: Any) -> None:
    make("FRAME")
    (row,) = cli("limit", "list", "--json").json
    # one of r01 and two of the artist, and the five frames that the report need not show
    figures = {key: row[key] for key in ("running", "settled", "pending", "left", "counts")}
    assert figures == {"running": 8, "settled": 3, "pending": 5, "left": 0, "counts": "frames"}


def test_what_started_within_the_settle_window_before_the_report_is_pending_too(
    cli: Cli, make: Any, environment: pytest.MonkeyPatch
) -> None:
    # given a window of four minutes, when frames of r02 started three minutes before the licence server was asked
    make("HOST")
    environment.setenv("OPENCUE_SCHED_ACCOUNTING__LIMIT_SETTLE_WINDOW_SECONDS", "240")
    (row,) = cli("limit", "list", "--json").json
    # then the report need not show them
    assert (row["settled"], row["pending"]) == (2, 2)


def test_who_holds_a_limit_is_told_with_why_since_when_and_whose(cli: Cli, make: Any) -> None:
    make("HOST")
    said = cli("limit", "info", "nuke", "--json").json
    holders = [(it["machine"], it["why"], it["frames"], it["tokens"], it["is_host"]) for it in said["holders"]]
    assert holders == [
        ("r01", "both", 2, 1, True),
        ("r02", "frames", 1, 0, True),
        ("r03", "frames", 3, 0, True),
        ("ws017", "report", 0, 2, False),
    ]
    assert said["holders"][3]["users"] == "alice"
    assert all(holder["since"] for holder in said["holders"])
    assert cli("host", "info", "r01", "--json").json["limits"] == ["nuke"]
    assert any(words[:1] == ["ws017"] or "ws017" in words for words in cli("limit", "info", "nuke").words)


@pytest.mark.parametrize("limit_type", ["HOST", "FRAME"])
def test_a_limit_whose_report_is_too_old_is_said_to_be_open(cli: Cli, make: Any, limit_type: str) -> None:
    make(limit_type, ", int_report_ttl = 300, int_max_value = 1")
    (row,) = cli("limit", "list", "--json").json
    assert ("5m" in row["open"], row["left"]) == (True, None)


@pytest.mark.usefixtures("cli")
def test_why_a_limit_is_open_has_room_on_a_terminal_of_100_columns(make: Any) -> None:
    # given a limit with a long name, a soft value and a report that is too old: more than fits into a line
    make("HOST", ", int_report_ttl = 60, int_soft_value = 4, str_name = 'houdini-engine-for-batch-renders'")
    with on_terminal(["limit", "list"], columns=100) as (terminal, _):
        terminal.shows("no report for 60s")
    assert not terminal.overrun


def test_a_limit_is_kept_by_its_frames_and_not_by_artists(cli: Cli, build: Build) -> None:
    # given a limit whose frame gave its licence back, by the licence server's report, and one that an artist holds
    def farm(made: Farm) -> None:
        nuke, mari = made.limit("nuke", 5), made.limit("mari", 5)
        job = made.job([LayerSpec(frames=1, limits=[nuke])])
        made.run(job.frames, made.host())
        if has_types(made.connection):
            report_held(made.connection, mari, "ws1")
            made.connection.execute(text("UPDATE limit_record SET ts_reported = now()"))
        made.connection.execute(text("UPDATE proc SET ts_dispatched = now() - interval '1 hour'"))

    build(farm)
    # when they are deleted, then only the one whose frame still runs is kept
    assert cli("limit", "delete", "nuke").status == 1
    assert cli("limit", "delete", "mari").status == 0


def test_what_else_a_limit_is_may_be_set(cli: Cli, make: Any) -> None:
    # given a limit, when all of it is set
    make("HOST")
    terms = ("--soft", "6", "--enforcement", "advisory", "--ttl", "20m", "--exit-status", "330", "--delay", "5")
    said = cli("limit", "set", "nuke", "9", *terms, "--no-auto-tag", "--json")
    # then it is so, and open, for it only advises
    wanted = {
        "max": 9,
        "soft": 6,
        "enforcement": "ADVISORY",
        "open": "advisory",
        "ttl": 1200,
        "exit_status": 330,
        "delay_minutes": 5,
        "auto_tag": False,
    }
    assert {key: said.json[key] for key in wanted} == wanted
    # and all of it may be taken back, and given to a new one
    cli("limit", "set", "nuke", "--soft", "-1", "--exit-status", "none", "--enforcement", "ENFORCED", "--ttl", "0")
    (row,) = cli("limit", "list", "--json").json
    assert (row["soft"], row["exit_status"], row["open"], row["ttl"]) == (None, None, "", None)
    made = cli("limit", "create", "mari", "3", "--type", "HOST", "--exit-status", "330", "--json").json
    assert (made["exit_status"], made["auto_tag"], made["counts"]) == (330, True, "machines")


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (("--exit-status", "330"), 1, ["330", "mari"]),
        (("--exit-status", "0"), 2, ["0", "2"]),
        (("--exit-status", "1"), 2, ["1", "2"]),
        (("--ttl", "soon"), 2, ["'soon'"]),
        (("--soft", "-2"), 2, []),
        (("--delay", "-1"), 2, []),
        ((), 2, ["MAX", "--type"]),
    ],
)
def test_what_a_limit_cannot_be_is_refused(
    cli: Cli, make: Any, words: tuple[str, ...], status: int, says: list[str]
) -> None:
    make("HOST")
    cli("limit", "create", "mari", "3", "--exit-status", "330")
    refused = cli("limit", "set", "nuke", *words)
    assert refused.status == status
    assert not lacks(refused.err, *says)


def test_a_database_before_v49_knows_a_maximum_and_a_type(cli: Cli, build: Build, engine: Engine) -> None:
    build(lambda farm: farm.limit("nuke", 8))
    with engine.begin() as connection:
        before_v49(connection)
    refused = cli("limit", "set", "nuke", "--exit-status", "330")
    assert refused.status == 1
    assert "V49" in refused.err
    said = cli("limit", "set", "nuke", "9", "--type", "HOST")
    assert said.status == 0, said.err
    assert said.words[1] == ["nuke", "0", "9", "9", "machines"]
    assert cli("limit", "info", "nuke").status == 0


def test_layers_are_listed_with_how_they_were_bound_and_what_was_learnt_is_taken_back(
    cli: Cli, build: Build, engine: Engine, rows: Rows
) -> None:
    # given layers that a job file bound, that a frame's exit status did, and that have another limit
    def make(farm: Farm) -> None:
        if not has_types(farm.connection):
            pytest.skip("no sources before V49")
        nuke = farm.limit("nuke", 8)
        show = farm.show()
        farm.job([LayerSpec(name="spec", limits=[nuke])], show=show, name="by-file")
        job = farm.job([LayerSpec(name=name, frames=2) for name in ("learnt", "kept", "plain")], show=show, name="comp")
        for layer in job.layers[:2]:
            farm.connection.execute(
                text(
                    "INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record, str_source)"
                    " VALUES (gen_random_uuid()::text, :layer, :limit, 'AUTO')"
                ),
                {"layer": layer.id, "limit": nuke},
            )

    build(make)
    # when a person binds three of them, then what was learnt is theirs, and what a job file said stays that
    for job, layer in (("comp", "kept"), ("comp", "plain"), ("by-file", "spec")):
        assert cli("layer", "set", job, layer, "--add-limit", "nuke").status == 0
    listed = cli("limit", "bindings", "nuke", "--json").json
    assert [(row["job"], row["layer"], row["source"]) for row in listed] == [
        ("by-file", "spec", "SPEC"),
        ("comp", "learnt", "AUTO"),
        ("comp", "kept", "MANUAL"),
        ("comp", "plain", "MANUAL"),
    ]
    assert ["comp", "learnt", "auto"] in [words[:3] for words in cli("limit", "bindings", "nuke").words]
    # and what is still learnt is taken back, and nothing else
    assert cli("limit", "unbind", "nuke").status == 2
    assert not lacks(cli("limit", "unbind", "nuke", "--auto").out, "nuke", "1 layer")
    assert [row["layer"] for row in cli("limit", "bindings", "nuke", "--json").json] == ["spec", "kept", "plain"]
    assert not lacks(cli("limit", "unbind", "nuke", "--auto").out, "nuke", "0 layers")
