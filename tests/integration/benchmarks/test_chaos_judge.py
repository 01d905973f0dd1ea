"""The chaos benchmark's judgement at the end of a run, on a farm in PostgreSQL that is made wrong by hand."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import Engine, text

from benchmarks.chaos import holds, silent_changes
from benchmarks.chaos.judgement import judge as judge_run
from benchmarks.chaos.run import LEAST_SAMPLES_PER_SECOND
from benchmarks.chaos.verdict import ChaosReport
from opencue_sched.embedded.farms.farm import Farm

SECONDS = 10.0
OFTEN = [number / 40 for number in range(int(SECONDS * 40) + 1)]
"""The moments of a witness that looked forty times a second, all the time."""
Judge = Callable[..., list[str]]


@pytest.fixture
def judge(engine: Engine, tmp_path: Any) -> Judge:
    """Judges a run of which nothing is wrong but what is given, and returns the violations."""
    with engine.begin() as connection:
        holds.plant_witness(connection)
        silent_changes.plant_witness(connection)

    def judged(**wrong: Any) -> list[str]:
        farm = SimpleNamespace(runs=list, violations=lambda: wrong.get("damage", []))
        fleet = SimpleNamespace(directory=tmp_path)
        crew = SimpleNamespace(fleet=fleet, fell=wrong.get("fell", []), starts_failed={})
        witness: Any = SimpleNamespace(
            booked=[],
            seen=set(),
            samples=wrong.get("samples", OFTEN),
            began=0,
            ended=SECONDS,
            violations=wrong.get("violations", []),
            forbidden=wrong.get("forbidden", []),
            judged={},
        )
        here: Any = SimpleNamespace(farms=[farm], crew=crew, engine=engine)
        faults: Any = SimpleNamespace(injected=[], kinds=frozenset(), flips=0, flips_interrupted=0)
        load: Any = SimpleNamespace(jobs=1)
        servers: Any = SimpleNamespace(reports=0)
        report = ChaosReport(1, SECONDS, 2)
        judge_run(
            report,
            least_samples=LEAST_SAMPLES_PER_SECOND,
            here=here,
            faults=faults,
            load=load,
            servers=servers,
            witness=witness,
        )
        return report.violations

    return judged


@pytest.mark.parametrize(
    ("found", "wrong"),
    [
        ("a vertex", {"violations": ["a vertex"]}),
        ("a booking", {"forbidden": ["a booking"]}),
        (" 0.0 ", {"samples": []}),
        ("worker1", {"fell": ["worker1"]}),
        ("ran twice", {"damage": ["a frame that ran twice"]}),
    ],
)
def test_whatever_the_witnesses_saw_fails_the_run(judge: Judge, found: str, wrong: dict[str, Any]) -> None:
    """Each judge's word reaches the report: a chaos run that finds nothing has looked."""
    assert judge() == []
    (violation,) = judge(**wrong)
    assert found in violation


def test_a_frame_that_never_succeeded_fails_the_run(engine: Engine, judge: Judge) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job()
    (violation,) = judge()
    assert job.frames[0] in violation


def test_a_frame_that_succeeded_without_a_run_fails_it(engine: Engine, judge: Judge) -> None:
    with engine.begin() as connection:
        job = Farm(connection).job()
        connection.execute(text("UPDATE frame SET str_state = 'SUCCEEDED'"))
    (violation,) = judge()
    assert job.frames[0] in violation
