"""The chaos benchmark's verdict, on runs, results and samples made by hand."""

from __future__ import annotations

import json
import re
from types import SimpleNamespace

import pytest

from benchmarks.chaos.faults import Fault
from benchmarks.chaos.site import Crew
from benchmarks.chaos.verdict import (
    ChaosReport,
    figures,
    log_errors,
    overlaps,
    recoveries,
    rendered_twice,
    sample_figures,
    wrong_results,
)
from opencue_sched.embedded.rqds.simulated_host import FrameRun
from tests.kit.wording import lacks

NOW = 100.0


def run(
    frame: str, started: float, ended: float | None, *, status: int | None = 0, host: str = "h1", killed: bool = False
) -> FrameRun:
    return FrameRun(
        host, frame, f"{frame}-proc", frame, "job", 100, started, ended,
        exit_status=None if ended is None else status, killed=killed,
    )  # fmt: skip


def test_a_result_for_each_run_is_right():
    runs = [run("f", 1, 2, status=1), run("f", 3, 4), run("g", 1, 2)]
    results = {("f", "h1", 1): 1, ("f", "h1", 0): 1, ("g", "h1", 0): 1}
    assert wrong_results(results, {"f", "g"}, runs) == []


def test_a_run_whose_result_never_counted_is_right_too():
    """Its completion was lost, or it was no longer the owner: the frame ran again."""
    assert wrong_results({("f", "h2", 0): 1}, {"f"}, [run("f", 1, 2), run("f", 3, 4, host="h2")]) == []


def test_two_good_results_of_one_frame_are_wrong_even_from_two_good_runs():
    runs = [run("f", 1, 2), run("f", 3, 4)]
    (line,) = wrong_results({("f", "h1", 0): 2}, {"f"}, runs)
    assert (lacks(line, "frame f"), re.findall(r"\b\d+\b", line)) == ([], ["2"])
    runs = [run("f", 1, 2), run("f", 3, 4, host="h2")]
    (line,) = wrong_results({("f", "h1", 0): 1, ("f", "h2", 0): 1}, {"f"}, runs)
    assert (lacks(line, "frame f"), re.findall(r"\b\d+\b", line)) == ([], ["2"])


def test_one_failure_counted_twice_is_wrong():
    runs = [run("f", 1, 2, status=1), run("f", 3, 4)]
    (line,) = wrong_results({("f", "h1", 1): 2, ("f", "h1", 0): 1}, {"f"}, runs)
    assert (lacks(line, "frame f", "h1"), re.findall(r"\b\d+\b", line)) == ([], ["2", "1", "1"])


@pytest.mark.parametrize(
    "runs",
    [[], [run("f", 1, 2, host="h2")], [run("f", 1, 2, status=1)], [run("f", 1, None)]],
    ids=["no run", "another host's", "a failed run", "a run that goes on"],
)
def test_a_result_without_a_run_that_ended_so_is_wrong(runs):
    (line,) = wrong_results({("f", "h1", 0): 1}, {"f"}, runs)
    assert (lacks(line, "frame f", "h1"), re.findall(r"\b\d+\b", line)) == ([], ["1", "0", "0"])


def test_a_frame_that_succeeded_without_any_result_is_wrong():
    (line,) = wrong_results({}, {"f"}, [run("f", 1, 2)])
    assert "frame f" in line


def test_runs_one_after_the_other_do_not_overlap():
    assert overlaps([run("f", 1, 2), run("f", 2, 3), run("g", 1, 9)], NOW) == []


def test_runs_at_once_overlap_by_the_time_they_share_on_any_hosts():
    runs = [run("f", 1, 5), run("f", 2, 3, host="h2"), run("f", 4, 9, host="h3"), run("f", 9, 10)]
    assert overlaps(runs, NOW) == [1, 1]


def test_a_run_that_goes_on_overlaps_until_now():
    assert overlaps([run("f", 90, None), run("f", 95, None, host="h2")], NOW) == [5]


def test_a_frame_is_rendered_twice_only_by_two_good_ends():
    runs = [run("f", 1, 2), run("f", 3, 4), run("g", 1, 2, status=1), run("g", 3, 4), run("h", 1, 2, killed=True)]
    assert rendered_twice([*runs, run("h", 3, 4)]) == 1


def test_a_fault_is_over_with_the_first_booking_committed_after_it():
    faults = [Fault("kill", "w1", 10.0, 10.1), Fault("kill", "w2", 20.0, 20.1), Fault("restart", "redis", 30.0, 32.0)]
    found = recoveries(faults, [31.0, 9.9, 10.05, 10.6, 20.2, 39.0])
    assert found == {"kill": [pytest.approx(0.6), pytest.approx(0.2)], "restart": [pytest.approx(9.0)]}


def test_a_fault_after_which_nothing_was_booked_has_no_recovery_and_is_counted_all_the_same():
    found = recoveries([Fault("kill", "w1", 10.0, 10.1), Fault("kill", "w2", 50.0, 50.1)], [11.0])
    (line,) = figures(found)
    assert (line.count, line.median_seconds, line.longest_seconds) == (2, 1.0, 1.0)
    (line,) = figures(recoveries([Fault("kill", "w1", 10.0, 10.1)], []))
    assert (line.count, line.median_seconds, line.longest_seconds) == (1, None, None)


def steady(began: float, ended: float, per_second: int) -> list[float]:
    return [began + number / per_second for number in range(int((ended - began) * per_second) + 1)]


def test_steady_samples_are_counted_by_the_second():
    found = sample_figures(steady(0, 10, 40), [], began=0, ended=10)
    assert found.count == 401
    assert found.per_second == pytest.approx(40, rel=0.01)
    assert (found.median_gap, found.longest_gap) == (pytest.approx(0.025), pytest.approx(0.025))


def test_time_without_a_database_is_neither_watched_nor_a_gap():
    samples = [*steady(0, 4, 40), *steady(6, 10, 40)]
    found = sample_figures(samples, [(3.9, 5.5), (5.0, 6.1)], began=0, ended=10)
    assert found.per_second == pytest.approx(40, rel=0.02)
    assert found.longest_gap < 0.1


def test_a_sampler_that_stopped_or_began_late_is_seen():
    stopped = sample_figures(steady(0, 4, 40), [(4.0, 4.5)], began=0, ended=10)
    assert stopped.per_second < 20
    assert stopped.longest_gap == pytest.approx(5.5)
    late = sample_figures(steady(6, 10, 40), [], began=0, ended=10)
    assert (late.per_second, late.longest_gap) == (pytest.approx(16, rel=0.02), pytest.approx(6))


@pytest.mark.parametrize(("samples", "away"), [([], []), ([1.0, 2.0], [(0.0, 10.0)])])
def test_without_a_sample_there_is_no_rate(samples, away):
    assert sample_figures(samples, away, began=0, ended=10).per_second == 0


def test_a_report_passes_without_violations_only_and_can_be_written():
    report = ChaosReport(1, 60, 4)
    assert report.passed
    report.violations.append("lost frames: 1")
    assert json.loads(json.dumps(report.as_dict()))["passed"] is False


def test_errors_and_tracebacks_in_the_logs_are_counted_by_event(tmp_path):
    (tmp_path / "worker1.log").write_text(
        '{"event": "commit_failed", "level": "error"}\n{"event": "booked", "level": "info"}\nTraceback (most recent)\n'
        '{"event": "commit_failed", "level": "error"}\nnot json "level": "error"\n'
    )
    assert log_errors(tmp_path) == {"commit_failed": 2, "Traceback": 1, "unreadable": 1}


@pytest.mark.parametrize(
    ("said", "fell"),
    [("beat: Starting...\nopencue-sched cannot start: PostgreSQL does not answer", False), ("beat_started", True)],
)
def test_a_beat_falls_only_once_it_has_its_stores(said, fell, tmp_path):
    """Until then it ends with what its supervisor starts it again for."""
    log = tmp_path / "beat1.log"
    log.write_text(f"{said}\n")
    beat = SimpleNamespace(running=False, log=log, exit_code=75, log_tail=lambda _: said)
    crew = Crew(SimpleNamespace(processes={"beat1": beat}))
    crew.tend()
    assert (bool(crew.fell), dict(crew.starts_failed)) == (fell, {} if fell else {"beat": 1})
