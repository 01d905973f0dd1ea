"""Whose PostgreSQL backends are counted as the workers' own."""

from __future__ import annotations

import pytest

from benchmarks.workbench import is_of_a_worker


@pytest.mark.parametrize(
    ("application_name", "of_a_worker"),
    [
        ("opencue-sched worker1", True),
        ("opencue-sched-listener", True),
        ("opencue-sched-bench", False),
        ("opencue-sched-beat", False),
        ("psql", False),
        ("", False),
    ],
)
def test_sessions_of_workers_are_told_from_those_that_end_frames(application_name: str, of_a_worker: bool) -> None:
    assert is_of_a_worker(application_name) == of_a_worker
