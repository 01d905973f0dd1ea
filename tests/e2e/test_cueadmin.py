"""The real cueadmin and pycue, from the package index, against a report service: shows are flipped without a Cuebot."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from opencue_sched.embedded.farm import Farm
from opencue_sched.embedded.farm_specs import LayerSpec
from opencue_sched.embedded.simulated_host import Behaviour

from .fleets import NONE_IS_LOST, FleetOnTest, fleet_on

CUEADMIN = Path(sys.executable).with_name("cueadmin")
PYCUE = """
import json
import opencue
show = opencue.api.findShow("demo")
show.setSchedulerManaged(True)
found = opencue.api.findShow("demo")
print(json.dumps({
    "managed": found.schedulerManaged(),
    "shows": sorted(one.name() for one in opencue.api.getShows()),
}))
"""


def environment(home: Path) -> dict[str, str]:
    """Nobody's own pycue configuration has a say."""
    mine = {key: value for key, value in os.environ.items() if not key.startswith(("OPENCUE_", "CUEBOT_"))}
    return {**mine, "HOME": str(home)}


def address(fleet: FleetOnTest) -> str:
    return f"127.0.0.1:{fleet.fleet.environment['OPENCUE_SCHED_RELEASE__PORT']}"


def cueadmin(fleet: FleetOnTest, home: Path, *words: str) -> str:
    """What cueadmin says; it exits with 0 even when it says ``Error``."""
    ran = subprocess.run(
        [CUEADMIN, "-server", address(fleet), "-force", *words],
        env=environment(home),
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return ran.stdout + ran.stderr


def flags(fleet: FleetOnTest) -> str:
    """Whether ``demo`` is managed and books."""
    return str(fleet.scalar("SELECT b_scheduler_managed || ' ' || b_booking_enabled FROM show WHERE str_name = 'demo'"))


def add_show(fleet: FleetOnTest, *, frames: int) -> str:
    with fleet.engine.begin() as connection:
        farm = Farm(connection)
        show = farm.show("demo")
        farm.subscription(show, farm.default_alloc(), size=100)
        return farm.job([LayerSpec(frames=frames)], show=show, os=None).id


def test_cueadmin_and_pycue_flip_a_show_whose_frames_run(settings, engine, redis_client, tmp_path):
    with engine.begin() as connection:
        Farm(connection).default_show()
    options = {
        "behaviour": Behaviour(run_seconds=(2.0, 4.0)),  # so that they do not end before a slow machine runs cueadmin
        "environment": {"OPENCUE_SCHED_ACCOUNTING__MANAGED_SHOWS_TTL": "1s", **NONE_IS_LOST},
    }
    with fleet_on(settings, engine, redis_client, tmp_path, **options) as fleet:
        # given a show of ours with frames running and more waiting
        job = add_show(fleet, frames=100)
        fleet.wait_for("frames running", lambda: fleet.scalar("SELECT count(*) FROM proc") >= 8)

        # when it is given back, then the flag is off when the command ends, and nothing new is booked
        said = cueadmin(fleet, tmp_path, "-scheduler-managed", "demo", "off")
        assert "Error" not in said
        assert flags(fleet) == "false true"
        fleet.wait_for("its frames' end", lambda: fleet.scalar("SELECT count(*) FROM proc") == 0)
        done = fleet.scalar("SELECT count(*) FROM frame WHERE str_state = 'SUCCEEDED'")
        assert 0 < done < 100

        # and when it is handed over again, it goes on
        said = cueadmin(fleet, tmp_path, "-scheduler-managed", "demo", "on")
        assert "Error" not in said
        assert flags(fleet) == "true true"
        fleet.wait_for("frames running", lambda: fleet.scalar("SELECT count(*) FROM proc") >= 8)

        # and while frames run, pycue flips it off and on; then everything ends and adds up
        cueadmin(fleet, tmp_path, "-scheduler-managed", "demo", "off")
        pycue = subprocess.run(
            [sys.executable, "-c", PYCUE],
            env={**environment(tmp_path), "CUEBOT_HOSTS": address(fleet)},
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        told = json.loads(pycue.stdout)
        assert told["managed"] is True
        assert told["shows"] == ["demo", "show"]
        fleet.assert_audit()
        fleet.farm.behave(run_seconds=(0.05, 0.1))
        fleet.wait_for("the job's end", lambda: fleet.finished(job))
        assert fleet.scalar("SELECT count(*) FROM frame WHERE str_state = 'SUCCEEDED'") == 100
        assert not fleet.farm.violations()
        fleet.assert_audit()


# A show settles for a commit deadline: long enough to kill the service that waits for it, also on a slow machine.
SETTLING = {
    "OPENCUE_SCHED_ACCOUNTING__COMMIT_DEADLINE": "30s",
    "OPENCUE_SCHED_ACCOUNTING__IN_FLIGHT_AGE": "90s",
    "OPENCUE_SCHED_HOST_CACHE__CHECKOUT_TIMEOUT": "40s",
}


def test_a_flip_cut_off_by_a_kill_is_completed_by_saying_it_again(settings, engine, redis_client, tmp_path):
    with engine.begin() as connection:
        Farm(connection).default_show()
    with fleet_on(settings, engine, redis_client, tmp_path, service=SETTLING) as fleet:
        add_show(fleet, frames=4)
        assert "there is no show 'dmeo'" in cueadmin(fleet, tmp_path, "-scheduler-managed", "dmeo", "on")

        # given a report service that is killed while the show settles on its way back
        command = [CUEADMIN, "-server", address(fleet), "-force", "-scheduler-managed", "demo", "off"]
        waiting = subprocess.Popen(
            command, env=environment(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            fleet.wait_for("booking off", lambda: flags(fleet) == "true false")
            fleet.fleet.processes["report-service"].kill()
        finally:
            waiting.kill()
            waiting.wait()
        assert flags(fleet) == "true false"

        # when a new one is told again
        fleet.fleet.stop("report-service")
        fleet.fleet.report_service("report-service-again")
        said = cueadmin(fleet, tmp_path, "-scheduler-managed", "demo", "off")

        # then it is done
        assert "Error" not in said
        assert flags(fleet) == "false true"
        fleet.assert_audit()
