"""The connections that the guide to running a fleet has an administrator reckon with."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.embedded.servers.processes import free_port
from tests.e2e.fleets import fleet_on
from tests.kit.connections import connections

GUIDE = Path(__file__).resolve().parents[2] / "docs" / "run.md"


def told(process: str) -> tuple[int, int]:
    """Connections to PostgreSQL and to Redis that the guide has for a process."""
    (found,) = re.findall(rf"^\| {process} \| (\d+)[^|]*\| (\d+)[^|]*\|$", GUIDE.read_text(encoding="utf-8"), re.M)
    return int(found[0]), int(found[1])


def test_no_process_of_a_busy_fleet_takes_more_connections_than_the_guide_says(
    settings, engine, redis_client, tmp_path
):
    ports = {"PostgreSQL": urlsplit(settings.sqlalchemy_url).port, "Redis": urlsplit(settings.redis_dsn).port}
    with engine.begin() as connection:
        Farm(connection).default_show()
    most: dict[str, Counter[str]] = {}
    with fleet_on(settings, engine, redis_client, tmp_path, hosts=10, cores=8) as fleet:
        fleet.fleet.flower(free_port())
        with engine.begin() as connection:
            farm = Farm(connection)
            show = farm.show("second")
            farm.subscription(show, farm.default_alloc(), burst=1000)
            jobs = [farm.job(layers=[LayerSpec(frames=60)], show=show, os=None) for _ in range(4)]

        def all_finished() -> bool:
            for name, process in fleet.fleet.processes.items():
                now = Counter({store: connections(process.pid, port) for store, port in ports.items()})
                most[name] = most.get(name, Counter()) | now
            return all(fleet.finished(job.id) for job in jobs)

        fleet.wait_for("the jobs' end", all_finished, seconds=90)
    seen = {name.rstrip("1").replace("-", " "): (taken["PostgreSQL"], taken["Redis"]) for name, taken in most.items()}
    assert seen.keys() == {"worker", "beat", "report service", "flower"}
    for process, (postgresql, redis) in seen.items():
        at_most = told(process)
        assert (postgresql <= at_most[0], redis <= at_most[1]) == (True, True), (process, postgresql, redis, at_most)
    assert min(redis for _, redis in seen.values()) > 0
