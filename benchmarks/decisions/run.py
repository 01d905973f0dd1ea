"""All scenarios, with each number of workers, and each control once; one line of figures for every run."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.decisions.record import Record
from benchmarks.decisions.scenario import Bound, Control, Scenario
from benchmarks.decisions.scenarios import SCENARIOS
from benchmarks.decisions.stage import Stores, known_setting, play
from benchmarks.warm_start import WarmFleet

ROUGH_PERCENT = 10
"""Of the machine's processors: with more in the hands of others, cores idle for want of a worker's time."""

Play = Callable[[Scenario, int], Record]


@dataclass(frozen=True, slots=True)
class Answer:
    """One run, judged. ``control`` says what was off; a control is right when the judge fails it.

    ``verdict`` is pass or fail; of a control also "fails as it should" and "passes" (which is wrong); or skipped.
    """

    scenario: str
    workers: int
    control: str
    verdict: str
    right: bool
    bounds: tuple[Bound, ...] = ()
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        figures = {
            bound.name: {name: _plain(getattr(bound, name)) for name in ("value", "least", "most", "kept")}
            for bound in self.bounds
        }
        shown = {name: getattr(self, name) for name in ("scenario", "workers", "control", "verdict", "right", "note")}
        return {**shown, "figures": figures}


def chosen(names: Sequence[str]) -> list[Scenario]:
    """The scenarios of these names, in the order in which they are declared; all when none is named."""
    return [scenario for scenario in SCENARIOS if not names or scenario.name in names]


def control_of(scenario: Scenario) -> tuple[Scenario | None, list[str]]:
    """The scenario with its policy off, and the settings that it needs and this version does not have."""
    control = scenario.control
    if control is None:
        return None, []
    missing = [name for name in control.queue if not known_setting(name)]
    changed = replace(scenario, queue={**scenario.queue, **control.queue}, **control.changes)
    return (None if missing else changed), missing


def judge(scenario: Scenario, workers: int, record: Record, *, control: Control | None = None) -> Answer:
    """The scenario's own figures, and what holds whatever is decided: a clean audit. Of a control its own figure."""
    divided = [Bound("shards", record.shards, workers)] if scenario.sharded else []
    bounds = (*scenario.judge(record), *divided, Bound("invariants broken", len(record.audit), most=0))
    passed = all(bound.kept for bound in bounds)
    missing = [f"no queue.{name} yet" for name in scenario.queue if not known_setting(name)]
    busy = [f"others had {record.others_percent} % of the machine"] if record.others_percent > ROUGH_PERCENT else []
    note = ", ".join([*missing, *record.audit, *busy])
    if control is not None:
        fails = any(bound.name == control.fails and not bound.kept for bound in bounds)
        verdict = "fails as it should" if fails else "passes, and should not"
        return Answer(scenario.name, workers, control.says, verdict, fails, bounds, note)
    return Answer(scenario.name, workers, "", "pass" if passed else "FAIL", passed, bounds, note)


def judge_control(scenario: Scenario, workers: int, play_it: Play) -> Answer | None:
    """None for a scenario that has no control of its own."""
    if scenario.control is None:
        return None
    controlled, missing = control_of(scenario)
    if controlled is None:
        note = f"no {', '.join(f'queue.{name}' for name in missing)} yet"
        return Answer(scenario.name, workers, scenario.control.says, "skipped", True, (), note)
    return judge(controlled, workers, play_it(controlled, workers), control=scenario.control)


def run_decisions(
    scenarios: Sequence[Scenario],
    workers: Sequence[int],
    console: Console,
    *,
    controls: bool = True,
    pace: float = 1.0,
    logs: Path | None = None,
) -> list[Answer]:
    """Each scenario with each number of workers; its controls with the smallest of them."""
    answers: list[Answer] = []
    began = time.monotonic()

    def heard(answer: Answer | None) -> None:
        if answer is not None:
            answers.append(answer)
            console.print(f"{time.monotonic() - began:6.1f} s  {one_line(answer)}", markup=False, soft_wrap=True)

    with Stores() as stores:
        records: list[tuple[Scenario, int, Record]] = []

        def play_it(scenario: Scenario, count: int) -> Record:
            """A run that was had already under another name is not had again."""
            staged = replace(scenario, name="", says="", judge=_nothing, control=None, more_controls=())
            for other, other_count, record in records:
                if other == staged and other_count == count:
                    return record
            with stores.fresh() as (database_url, redis_url):
                place = logs and logs / f"{scenario.name}-{count}-{len(records)}"
                record = play(scenario, count, database_url, redis_url, pace=pace, fleet_type=WarmFleet, logs=place)
            records.append((staged, count, record))
            return record

        for scenario in scenarios:
            for count in workers:
                heard(judge(scenario, count, play_it(scenario, count)))
            for control in scenario.controls if controls else ():
                heard(judge_control(replace(scenario, control=control), min(workers), play_it))
    return answers


def _plain(value: float) -> float | None:
    """JSON has no infinity."""
    return value if math.isfinite(value) else None


def _nothing(_: Record) -> Sequence[Bound]:
    return ()


def one_line(answer: Answer) -> str:
    what = f"{answer.scenario}, {answer.workers} worker(s)" + (f", {answer.control}" if answer.control else "")
    told = "; ".join(str(bound) for bound in answer.bounds)
    return f"{what}: {answer.verdict}; {told}" + (f"; {answer.note}" if answer.note else "")


def show_answers(answers: Sequence[Answer]) -> None:
    """One table, one line a run."""
    table = Table(title="decisions")
    for column in ("scenario", "workers", "policy", "verdict", "figures"):
        table.add_column(column, overflow="fold")
    for answer in answers:
        figures = "\n".join([*map(str, answer.bounds), *([answer.note] if answer.note else [])])
        table.add_row(answer.scenario, str(answer.workers), answer.control or "on", answer.verdict, escape(figures))
    Console().print(table)
