"""``benchmarks reports`` on a small farm, judged by what it counts: how fast it is depends on what else runs."""

from __future__ import annotations

import pytest

from benchmarks.figures import console
from benchmarks.reports import COMPLETIONS, FRAMES_OF_EACH, STATUS_REPORTS, run_reports

HOSTS = 100


@pytest.mark.long(75)
def test_reports_of_many_hosts_cost_few_statements_and_the_rows_that_they_name() -> None:
    found = {result.phase: result for result in run_reports(hosts=HOSTS, rounds=1, base=None, console=console)}
    statuses, completions = found[STATUS_REPORTS], found[COMPLETIONS]
    # The statistics of the host, and each frame with its proc; of the frames' peaks some are those of a layer and job.
    assert statuses.rows_updated_each.median <= 2.5 * FRAMES_OF_EACH
    # Written alone they would cost more than one each. How many meet depends on how fast they are sent.
    assert statuses.transactions_each.median <= 0.5
    assert completions.rows_updated_each.median <= 4
    assert completions.transactions_each.median <= 0.5
    # Counted where PostgreSQL has the module that counts them.
    assert statuses.statements_each.median <= 1.5
    assert completions.statements_each.median <= 3
