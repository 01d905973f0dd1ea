"""What ended and what it took, from OpenCue's history: ``show report`` and ``job list --since``."""

from __future__ import annotations

import csv
import io
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Any

import pytest
from sqlalchemy import Engine, text

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import JobIds, LayerSpec
from tests.kit.command import Cli
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]
Rows = Callable[..., list[Any]]

COMP, LIGHT = "moonrise-sh010-alice_comp", "harbour-sh010-bob_light"


@pytest.fixture(autouse=True)
def in_auckland(environment: pytest.MonkeyPatch) -> Iterator[None]:
    """The local zone is thirteen hours before UTC: days begin at another time than the database's."""
    environment.setenv("TZ", "NZDT-13")
    time.tzset()
    yield
    environment.undo()
    time.tzset()


@pytest.fixture
def jobs(build: Build, engine: Engine) -> dict[str, JobIds]:
    """Two jobs of two shows, and their runs: an hour of two cores each, GPUs beside one of them."""

    def make(farm: Farm) -> dict[str, JobIds]:
        made = {}
        for name, user in ((COMP, "alice"), (LIGHT, "bob")):
            made[name] = farm.job([LayerSpec(frames=3)], name=name, show=farm.show(name.split("-")[0]))
            for table in ("job", "job_history"):
                owner = text(f"UPDATE {table} SET str_user = :user WHERE pk_job = :job")  # noqa: S608 - our own names
                farm.connection.execute(owner, {"user": user, "job": made[name].id})
        return made

    made: dict[str, JobIds] = build(make)
    midnight = datetime.now().astimezone().replace(hour=0, minute=0, second=0, microsecond=0)
    just_before, just_after = midnight - timedelta(seconds=1), midnight + timedelta(seconds=1)
    with engine.begin() as connection:
        for name, ended, status, gpus in (
            (COMP, just_after, 0, 1),
            (COMP, just_after, 1, 0),
            (COMP, just_before, 0, 0),
            (LIGHT, just_after, 0, 0),
            (LIGHT, midnight - timedelta(days=30), 0, 0),
        ):
            job = made[name]
            row = {"frame": job.frames[0], "layer": job.layers[0].id, "job": job.id, "status": status, "gpus": gpus}
            connection.execute(
                text(
                    "INSERT INTO frame_history (pk_frame, pk_layer, pk_job, str_name, str_state, int_cores, int_gpus,"
                    " int_exit_status, int_ts_started, int_ts_stopped, dt_last_modified)"
                    " VALUES (:frame, :layer, :job, '0001', 'X', 200, :gpus, :status, :ended - 3600, :ended, now())"
                ),
                row | {"ended": int(ended.timestamp())},
            )
    return made


def test_runs_are_summed_by_show_user_and_local_day(cli: Cli, jobs: dict[str, JobIds]) -> None:
    by_show = cli("show", "report", "--since", "2d", "--json").json
    assert {row["show"]: (row["succeeded"], row["failed"]) for row in by_show} == {
        "moonrise": (2, 1),
        "harbour": (1, 0),
    }
    moonrise = by_show[0]
    assert (moonrise["core_hours_succeeded"], moonrise["core_hours_failed"], moonrise["gpu_hours"]) == (4.0, 2.0, 1.0)
    by_user = cli("show", "report", "--since", "today", "--by", "user", "--json").json
    assert {row["user"]: row["core_hours_succeeded"] for row in by_user} == {"alice": 2.0, "bob": 2.0}
    by_day = cli("show", "report", "--since", "yesterday", "--by", "day", "--show", "moonrise", "--json").json
    today = datetime.now().astimezone().date()
    assert {row["day"]: row["succeeded"] for row in by_day} == {
        (today - timedelta(days=1)).isoformat(): 1,
        today.isoformat(): 1,
    }


def test_a_report_is_a_table_with_a_sum_or_csv(cli: Cli, jobs: dict[str, JobIds]) -> None:
    table = cli("show", "report", "--since", "2d").words
    assert table[-1] == ["all", "3", "1", "6", "2", "1"]
    rows = list(csv.DictReader(io.StringIO(cli("show", "report", "--since", "2d", "--csv").out)))
    assert [(row["show"], row["core_hours_failed"]) for row in rows] == [("moonrise", "2.0"), ("harbour", "0.0")]
    nothing = cli("show", "report", "--since", "today", "--show", "harbour", "--by", "day", "--csv")
    assert nothing.status == 0


def test_finished_jobs_are_listed_also_those_of_the_history_alone(
    cli: Cli, jobs: dict[str, JobIds], engine: Engine
) -> None:
    # given: both jobs have finished, and one has been moved to the history
    with engine.begin() as connection:
        connection.execute(text("UPDATE job SET str_state = 'FINISHED', ts_stopped = now(), str_visible_name = NULL"))
        connection.execute(text("DELETE FROM job WHERE pk_job = :job"), {"job": jobs[LIGHT].id})
    listed = cli("job", "list", "--state", "finished", "--since", "today", "--json").json
    assert {job["job"] for job in listed} == {COMP, LIGHT}
    of_bob = cli("job", "list", "--state", "finished", "--since", "today", "--user", "bob", "--json").json
    assert [job["job"] for job in of_bob] == [LIGHT]
    assert len(cli("job", "list", "--state", "finished", "--json").json) == 1, "as before without --since"


def test_where_history_is_off_they_say_so(cli: Cli, jobs: dict[str, JobIds], engine: Engine) -> None:
    with engine.begin() as connection:
        connection.execute(text("INSERT INTO config (pk_config, str_key) VALUES ('c', 'DISABLE_HISTORY')"))
    for words in (("show", "report"), ("job", "list", "--state", "finished", "--since", "7d")):
        assert "history" in cli(*words).err


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (("show", "report", "--since", "soon"), ["'soon'"]),
        (("show", "report", "--since", "9999-12-31"), ["9999-12-31"]),
        (("show", "report", "--since", "1999-12-31"), ["1999-12-31"]),
        (("show", "report", "--since", "5000d"), ["5000d"]),
        (("job", "list", "--since", "today"), ["--since", "--state"]),
        (("show", "report", "--since", "0005000d"), ["0005000d"]),
    ],
)
def test_what_is_wrong_is_said(cli: Cli, words: tuple[str, ...], problem: list[str]) -> None:
    ran = cli(*words)
    assert ran.status == 2
    assert not lacks(ran.err, *problem)
