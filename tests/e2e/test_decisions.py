"""Three scenarios of ``benchmarks decisions`` on small farms: real workers and beat, simulated ends of frames.

Whether cores are idle between two frames depends on what else the machine does, so how full the farm is is not judged
here.
"""

from __future__ import annotations

import pytest

from benchmarks.decisions.record import Record
from benchmarks.decisions.run import judge
from benchmarks.decisions.scenario import Scenario
from benchmarks.decisions.scenarios import reduced
from benchmarks.decisions.stage import play
from benchmarks.warm_start import WarmFleet
from tests.kit.databases import Databases

MOST_FOR_OTHERS_PERCENT = 90
"""Of the processors: where others have more, the fleet cannot do in time what is to happen in a scenario."""


@pytest.mark.long(25)
@pytest.mark.parametrize("scenario", reduced(), ids=lambda scenario: scenario.name)
def test_a_small_farm_decides_as_the_policies_say(
    scenario: Scenario, databases: Databases, redis_server, redis_client, tmp_path
):
    workers = 1 if scenario.name == "dependencies" else 2

    def played(pace: float) -> tuple[Record, list[str]]:
        redis_client.flushdb()
        logs = tmp_path / f"pace{pace}"
        logs.mkdir()
        url = databases.take()
        try:
            record = play(scenario, workers, url, redis_server.url, pace=pace, fleet_type=WarmFleet, logs=logs)
        finally:
            databases.give_back(url)
        broken = [str(bound) for bound in judge(scenario, workers, record).bounds if not bound.kept]
        return record, [figure for figure in broken if "utilisation" not in figure]

    record, broken = played(1)
    if broken and record.others_percent > MOST_FOR_OTHERS_PERCENT:
        # One second of the scenario takes eight then.
        record, broken = played(8)
    assert broken == [], f"of {len(record.runs)} runs"
