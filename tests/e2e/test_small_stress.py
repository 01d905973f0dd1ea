"""``benchmarks stress``, small, also where triggers count and record frames row by row, as a Cuebot's do.

How many plans come too late for their commit is not judged, a busy machine has many; nor the rows written: a server
tells of those of a session once a second, and forgets the last of a short run.
"""

from __future__ import annotations

import pytest
from rich.console import Console
from sqlalchemy import create_engine

from benchmarks.stress import ENVIRONMENT, run_stress
from benchmarks.warm_start import WarmFleet
from benchmarks.workbench import workbench
from opencue_sched.errors import SchedulerError
from opencue_sched.store import schema
from tests.kit.row_triggers import count_row_by_row

MOST_STATEMENTS_PER_FRAME = 0.5


def book_and_count(database_url: str, *, workers: int) -> None:
    """Workers book the farms of the benchmark there, and the audit finds each frame counted."""
    with workbench(ENVIRONMENT, database_url=database_url, fleet_type=WarmFleet) as bench:
        results = run_stress(bench, workers=workers, scale=0.2, console=Console(quiet=True))
    for result in results:
        assert result.passed
        assert result.deadlocks == 0
    assert results[0].sql_statements_per_frame <= MOST_STATEMENTS_PER_FRAME


@pytest.mark.long(45)
def test_bookings_keep_counters_that_our_triggers_write_once_a_statement(empty_database_url: str) -> None:
    schema.upgrade(empty_database_url)
    book_and_count(empty_database_url, workers=1)


@pytest.mark.long(45)
def test_bookings_keep_counters_that_triggers_write_row_by_row(empty_database_url: str) -> None:
    # given a database whose two functions write row by row, in a text that nobody knows
    schema.upgrade(empty_database_url)
    engine = create_engine(empty_database_url)
    with engine.begin() as connection:
        count_row_by_row(connection)
    # when somebody asks for set-based frames, then the functions are left as they are
    with pytest.raises(SchedulerError, match="trigger__"):
        schema.set_frames_way(empty_database_url, set_based=True)
    # and workers book with them
    book_and_count(empty_database_url, workers=2)
    with engine.connect() as connection:
        assert not schema.check_schema(connection).set_based_frames
    engine.dispose()
