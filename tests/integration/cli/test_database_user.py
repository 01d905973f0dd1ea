"""Every command that changes something, run as a database user that owns nothing and may what `doctor` asks for."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import click
import pytest
from sqlalchemy import Engine

from opencue_sched.cli import COMMANDS
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.rqds.simulated_host import HostSpec as SimulatedSpec
from opencue_sched.embedded.rqds.simulated_rqd import SimulatedFarm
from opencue_sched.settings import Settings
from opencue_sched.store.schema import read_origin
from tests.kit.command import Cli
from tests.kit.database_users import as_user, database_user, grant_what_doctor_asks_for, run_all
from tests.kit.noting_rqd import noting_rqd
from tests.kit.wording import lacks

Build = Callable[[Callable[[Farm], Any]], Any]

JOB_FILE = """
{show: demo, shot: s, user: u, name: %s, max_cores: 10, env: {A: b}, layers: [
  {name: a, command: render, range: 1-3, memory: 1GiB, limits: [arnold]},
  {name: b, command: render, range: 1-3, depends: [a]}]%s}
"""

CHANGES = """
show create demo --managed
show active demo on
show booking demo off
show booking demo on
show default-min-cores demo 1
show default-max-cores demo 100
show managed demo off
show managed demo on
alloc create cloud.gpu --tag gpu --new-facility
alloc create local.more --tag more
alloc tag cloud.gpu fast
subscription create demo local.more 100 120
subscription size demo local.more 90
subscription burst demo local.more 110
subscription delete demo local.more
limit create arnold 5
limit create spare 5
limit set arnold 6
limit report arnold --nobody
limit unbind arnold --auto
limit delete spare
folder create demo lighting --max-cores 50
folder caps demo lighting --max-gpus 4
submit FIRST
submit SECOND
folder move demo-s-u_first lighting
job pause demo-s-u_first
job unpause demo-s-u_first
job priority demo-s-u_first 70
job max-cores demo-s-u_first 20
job min-cores demo-s-u_first 2
job max-gpus demo-s-u_first 2
job eat demo-s-u_first --layer a --frames 1 --state WAITING --reason test
job retry demo-s-u_first --state EATEN --reason test
job depends drop demo-s-u_second --all
job depends add demo-s-u_second --on demo-s-u_first --on-layer a
job set demo-s-u_first --max-retries 2 --autoeat
job comment demo-s-u_first looked-at
job kill demo-s-u_second --yes --reason test
layer set demo-s-u_first a --cores 2 --memory 2GiB --tags general --timeout 60 --drop-limit arnold
layer start-after demo-s-u_first a clear
service create arnold --memory 8GiB
service set arnold --gpus 1
host comment render01 looked-at
host lock render01 --reason fan
host unlock render01
host tags add render01 ssd
host tags remove render01 ssd
host move render01 local.more
host reboot render01 --yes
host down render01 --yes
host delete render03
proc kill --host render02 --yes --reason test
"""
"""One command a line, each on what those before it left."""
CUEBOTS_OWN = ("limit report", "limit unbind", "service create", "service set")
"""Commands that are refused on a Cuebot's database, whoever runs them: the services there, and the limits that learn
from reports, are the Cuebot's."""

READ_ALONE = {
    "alloc list",
    "audit",
    "board list",
    "board show",
    "doctor",
    "explain",
    "fleet",
    "folder list",
    "host info",
    "host list",
    "job depends list",
    "job depends tree",
    "job frames",
    "job info",
    "job list",
    "job log",
    "job wait",
    "layer list",
    "limit bindings",
    "limit info",
    "limit list",
    "proc list",
    "service list",
    "show info",
    "show list",
    "show report",
    "subscription list",
    "top",
}
CHANGE_REDIS = {"board restore", "board trash", "ctl drain", "ctl pause", "ctl resume", "ctl sleep", "ctl stop"}
RUN_ELSEWHERE = {"demo", "dispatch", "migrate", "report-service"}
"""What a worker does, or the owner; a fleet as such a user has a test of its own."""


def every_command() -> Iterator[str]:
    """The names of all commands that do something, in full."""
    for name, (module_name, _) in COMMANDS.items():
        module = importlib.import_module(f"opencue_sched.cli.{module_name}")
        yield from leaves(name, getattr(module, f"{name.replace('-', '_')}_command", None) or module.command)


def leaves(name: str, command: click.Command) -> Iterator[str]:
    if not isinstance(command, click.Group):
        yield name
        return
    for below, child in command.commands.items():
        yield from leaves(f"{name} {below}", child)


def test_every_command_that_changes_something_works_with_the_privileges_that_doctor_asks_for(
    cli: Cli, build: Build, engine: Engine, settings: Settings, environment: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    # given a host to reboot, one where a frame runs, and two jobs, of which one waits for the other
    def make(farm: Farm) -> None:
        farm.host(name="render01", cores=8)
        farm.run(farm.job([LayerSpec()]).frames, farm.host(name="render02", cores=8))
        farm.host(name="render03", cores=8, state="DOWN")

    build(make)
    files = {
        "FIRST": JOB_FILE % ("first", ""),
        "SECOND": JOB_FILE % ("second", ", depends: [demo-s-u_first]"),
    }
    for name, content in files.items():
        (tmp_path / f"{name}.yaml").write_text(content)
    lines = CHANGES.strip().splitlines()

    # when each command is run as that user
    rendering, told = SimulatedFarm([SimulatedSpec("render02")]), noting_rqd()
    with database_user(engine) as user, rendering as rqd, told as (_, address):
        environment.setenv("OPENCUE_SCHED_RQD__ADDRESSES", json.dumps({"render01": address, **rqd.addresses}))
        grant_what_doctor_asks_for(engine, user)
        environment.setenv("OPENCUE_SCHED_DATABASE_URL", as_user(settings, user).sqlalchemy_url)
        failed = {}
        for line in lines:
            ran = cli(*(str(tmp_path / f"{word}.yaml") if word in files else word for word in line.split()))
            if ran.status:
                failed[line] = f"{ran.out}{ran.err}"

    # then all work, and no command of ours was left out
    with engine.connect() as connection:
        beside_a_cuebot = read_origin(connection) == "cuebot"
    refused = {line for line in lines if beside_a_cuebot and line.startswith(CUEBOTS_OWN)}
    assert failed.keys() == refused, failed
    run = {command for command in every_command() if any(f"{line} ".startswith(f"{command} ") for line in lines)}
    assert set(every_command()) == run | READ_ALONE | CHANGE_REDIS | RUN_ELSEWHERE


@pytest.mark.parametrize(("origin", "asked"), [("cuebot", False), ("opencue-sched", True)])
def test_doctor_asks_for_the_table_of_finished_jobs_only_where_it_is_read(
    cli: Cli, engine: Engine, settings: Settings, environment: pytest.MonkeyPatch, origin: str, asked: bool
) -> None:
    run_all(engine, f"UPDATE opencue_sched_origin SET origin = '{origin}'")  # noqa: S608
    with database_user(engine) as user:
        grant_what_doctor_asks_for(engine, user)
        run_all(engine, f"REVOKE ALL ON task_lock FROM {user}")
        environment.setenv("OPENCUE_SCHED_DATABASE_URL", as_user(settings, user).sqlalchemy_url)
        told = [found for found in cli("doctor", "--json").json["findings"] if found["what"] == "privileges"]
    assert [(found["level"], lacks(found["text"], "SELECT on task_lock")) for found in told] == (
        [("FAIL", [])] if asked else []
    )
