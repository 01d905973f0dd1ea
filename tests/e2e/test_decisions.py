"""Three scenarios of ``benchmarks decisions`` on small farms: real workers and beat, simulated ends of frames.

Whether cores are idle between two frames depends on what else the machine does, so how full the farm is is not judged
here.
"""

from __future__ import annotations

import pytest

from benchmarks.decisions.run import judge
from benchmarks.decisions.scenario import Scenario
from benchmarks.decisions.scenarios import reduced
from benchmarks.decisions.stage import play
from benchmarks.warm_start import WarmFleet


@pytest.mark.long(25)
@pytest.mark.parametrize("scenario", reduced(), ids=lambda scenario: scenario.name)
def test_a_small_farm_decides_as_the_policies_say(
    scenario: Scenario, database_url, redis_server, redis_client, tmp_path
):
    workers = 1 if scenario.name == "dependencies" else 2
    record = play(scenario, workers, database_url, redis_server.url, fleet_type=WarmFleet, logs=tmp_path)
    broken = [str(bound) for bound in judge(scenario, workers, record).bounds if not bound.kept]
    assert [figure for figure in broken if "utilisation" not in figure] == [], f"of {len(record.runs)} runs"
