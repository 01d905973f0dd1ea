"""``benchmarks stress`` where triggers count and record frames row by row, as a Cuebot's do, judged by its counts."""

from __future__ import annotations

import pytest
from rich.console import Console
from sqlalchemy import create_engine

from benchmarks.stress import ENVIRONMENT, run_stress
from benchmarks.workbench import workbench
from opencue_sched.errors import SchedulerError
from opencue_sched.store import schema
from tests.kit.row_triggers import count_row_by_row


@pytest.mark.long(60)
def test_bookings_keep_counters_that_triggers_write_row_by_row(empty_database_url: str) -> None:
    # given a database whose two functions write row by row, in a text that nobody knows
    schema.upgrade(empty_database_url)
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        count_row_by_row(connection)
    engine.dispose()
    # when somebody asks for set-based frames, then the functions are left as they are
    with pytest.raises(SchedulerError, match="is none that this program knows"):
        schema.set_frames_way(empty_database_url, set_based=True)
    # when workers book farms there, then the audit finds each frame counted. How many plans come too late for their
    # commit is not judged, a busy machine has many; nor the rows written: a server tells of those of a session once a
    # second, and forgets the last of a short run.
    console = Console(record=True)
    with workbench(ENVIRONMENT, database_url=empty_database_url) as bench:
        results = run_stress(bench, workers=2, scale=0.2, console=console)
    assert "by the frame triggers" in console.export_text()
    for result in results:
        assert result.passed
        assert result.deadlocks == 0
    assert results[0].sql_statements_per_frame <= 0.5
