"""The judges of ``benchmarks decisions``: what they find in records of which the answer is known."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from benchmarks.decisions import record as of
from benchmarks.decisions import run as decisions
from benchmarks.decisions import scenarios
from benchmarks.decisions.record import Layer, Machine, Record, Run, Wait
from benchmarks.decisions.scenario import Bound, Control, Scenario

SHOW = Layer("layer", "work", "show", 0, 1)


def run_of(work: str = "work", *, show: str = "show", host: str = "h1", cores: int = 1, **how: Any) -> Run:
    frame = how.pop("frame", "frame")
    times = {name: how.pop(name) for name in ("began", "ended") if name in how}
    layer = Layer(how.pop("layer", work), work, show, 0, cores, **how)
    return Run(frame, layer, host, cores, **{"began": 0.0, **times}, gpus=layer.gpus)


def record_of(*runs: Run, seconds: float = 10.0, hosts: int = 1, cores: int = 16, **how: Any) -> Record:
    farm = {f"h{number}": Machine(f"h{number}", "cpu", cores) for number in range(1, hosts + 1)}
    return Record(seconds, farm, runs, **how)


def kept(bounds: Any) -> dict[str, bool]:
    return {bound.name: bound.kept for bound in bounds}


# Figures


def test_cores_are_counted_for_the_part_of_the_window_in_which_they_were_in_use() -> None:
    record = record_of(run_of(cores=4, ended=5.0), run_of(cores=8, began=5.0))
    assert record.shows(0, 10) == {"show": 6.0}
    assert record.utilisation(5, 10) == 0.5


def test_a_peak_counts_what_ends_before_what_begins_at_the_same_moment() -> None:
    record = record_of(run_of(ended=5.0), run_of(began=5.0), run_of(began=6.0))
    assert record.peak(lambda _: 1.0) == 2


@pytest.mark.parametrize(
    ("sizes", "wants", "due"),
    [
        ({"a": 1, "b": 3}, {}, {"a": 25, "b": 75}),
        ({"a": 1, "b": 3}, {"b": 15}, {"a": 85, "b": 15}),
        ({"a": 1, "b": 1, "c": 2}, {"a": 5}, {"a": 5, "b": 95 / 3, "c": 190 / 3}),
        ({"a": 1, "b": 1}, {"a": 5, "b": 5}, {"a": 5, "b": 5}),
    ],
)
def test_what_a_show_does_not_want_goes_to_the_others_by_size(sizes: Any, wants: Any, due: Any) -> None:
    assert of.max_min(100, sizes, wants) == pytest.approx(due)


def test_the_gap_is_the_part_that_the_wrong_shows_have() -> None:
    assert of.gap({"a": 25, "b": 75}, {"a": 25, "b": 75}) == 0
    assert of.gap({"a": 100}, {"a": 25, "b": 75}) == pytest.approx(0.75)
    assert of.gap({"stranger": 100}, {"a": 100}) == 1


def test_rank_correlation_with_ties_and_without_spread() -> None:
    assert of.rank_correlation([(1, 10), (2, 20), (3, 30)]) == pytest.approx(1)
    assert of.rank_correlation([(1, 30), (2, 20), (3, 10)]) == pytest.approx(-1)
    assert of.rank_correlation([(1, 5), (2, 5), (3, 5)]) == 0
    assert 0 < of.rank_correlation([(1, 0), (2, 0), (3, 0), (4, 9)]) < 1


def test_a_refill_is_at_home_where_the_layer_runs_or_was_among_the_last_to_end() -> None:
    runs = [
        run_of("a", ended=1.0),
        run_of("a", began=0.5, host="h2"),  # elsewhere: not at home
        run_of("b", began=1.0, ended=2.0),  # not at home
        run_of("a", began=3.0),  # a and b ended here
    ]
    assert of.refills_at_home(record_of(*runs, hosts=2), 0.2, remembered=2) == pytest.approx(1 / 3)
    assert of.refills_at_home(record_of(*runs, hosts=2), 0.2, remembered=1) == 0


def test_a_flooded_host_counts_for_the_time_above_the_bound() -> None:
    runs = [run_of("flood", frame=str(number), began=0.0, ended=4.0) for number in range(3)]
    runs += [run_of("other", frame=str(number), began=0.0) for number in range(9)]
    record = record_of(*runs, hosts=2)
    assert of.flooded(record, "flood", 0, 8, bound=lambda _: 2) == pytest.approx(0.25)
    assert of.flooded(record, "flood", 0, 8, bound=lambda _: 3) == 0
    assert of.flooded(record, "flood", 2, 4, bound=lambda _: 2) == pytest.approx(0.5)


def test_a_start_before_what_it_needs_has_ended_is_premature() -> None:
    first, second = run_of(frame="1", ended=3.0), run_of(frame="2", began=2.0)
    assert of.premature(record_of(first, second, needs={"2": ["1"]})) == 1
    assert of.premature(record_of(first, replace(second, began=3.0), needs={"2": ["1"]})) == 0
    assert of.premature(record_of(second, needs={"2": ["1"]})) == 1, "what it needs never ran"


def test_two_runs_of_a_frame_at_once_overlap() -> None:
    assert of.overlapping(record_of(run_of(ended=3.0), run_of(began=2.0))) == 1
    assert of.overlapping(record_of(run_of(ended=3.0), run_of(began=3.0), run_of(frame="other"))) == 0


def test_a_fill_takes_from_the_first_start_to_that_of_the_wanted_part() -> None:
    waits = [Wait(SHOW, 0.0, float(began)) for began in range(1, 11)]
    assert of.filled_at(record_of(waits=waits), "work", 0.9) == 8
    assert of.filled_at(record_of(waits=[*waits, *[Wait(SHOW, 0.0, None)] * 10]), "work", 0.9) == float("inf")
    assert of.filled_at(record_of(waits=[]), "work", 0.9) == float("inf")


# Judges


def classes(parts: dict[int, int]) -> Record:
    runs = [
        run_of(str(priority), priority=priority, began=5.0, ended=6.0)
        for priority, count in parts.items()
        for _ in range(count)
    ]
    return record_of(*runs)


def test_strict_rank_and_a_draw_are_told_apart() -> None:
    strict, drawn = classes({100: 200}), classes({priority: priority for priority in range(10, 101, 10)})
    assert all(kept(scenarios.judge_rank(strict)).values())
    assert not all(kept(scenarios.judge_rank(drawn)).values())
    assert all(kept(scenarios.judge_draw(drawn)).values())
    assert not all(kept(scenarios.judge_draw(strict)).values())


def test_a_part_by_draw_is_neither() -> None:
    part = classes({**{priority: priority // 10 for priority in range(10, 100, 10)}, 100: 150})
    assert all(kept(scenarios.judge_part_by_draw(part)).values())
    for other in (classes({100: 200}), classes({priority: priority for priority in range(10, 101, 10)})):
        assert not all(kept(scenarios.judge_part_by_draw(other)).values())


def shows(**cores: int) -> Record:
    return record_of(*[run_of(show=show, cores=count) for show, count in cores.items()], seconds=20, cores=640)


def test_shares_as_due_pass_and_equal_ones_do_not() -> None:
    assert all(kept(scenarios.judge_two_shows(shows(quarter=160, rest=480))).values())
    assert not kept(scenarios.judge_two_shows(shows(quarter=320, rest=320)))["part of the quarter"]
    assert not kept(scenarios.judge_two_shows(shows(quarter=100, rest=300)))["utilisation"], "cores idle"


def test_a_cap_that_is_passed_for_a_moment_fails_and_so_does_one_that_is_not_used() -> None:
    full = {"burst of alpha": 200.0, "burst of beta": 150.0, "folder of gamma": 96.0, "nuke": 12.0}
    capped = [run_of("capped", show="beta", cores=24)]
    assert all(kept(scenarios.judge_caps(record_of(*capped, counters=full))).values())
    for name in full:
        over = {**full, name: full[name] + 1}
        assert not all(kept(scenarios.judge_caps(record_of(*capped, counters=over))).values())
    brief = [*capped, run_of("capped", show="beta", cores=4, began=1.0, ended=1.1)]
    assert not all(kept(scenarios.judge_caps(record_of(*brief, counters=full))).values())
    assert not all(kept(scenarios.judge_caps(record_of(*capped, counters={**full, "nuke": 3.0}))).values())


# Declarations


def test_scenarios_have_different_names_and_work_whose_shows_and_licences_are_there() -> None:
    every = scenarios.SCENARIOS
    assert len({scenario.name for scenario in every}) == len(every)
    for scenario in every:
        assert {work.show for work in scenario.work} <= {show.name for show in scenario.shows}, scenario.name
        assert {name for work in scenario.work for name in work.licences} <= scenario.licences.keys(), scenario.name
        tags = {tag for hosts in scenario.hosts for tag in (hosts.tag, hosts.name)}
        assert {work.tag for work in scenario.work} <= tags, scenario.name
        assert all(work.at < scenario.seconds for work in scenario.work), scenario.name


def test_a_days_work_asks_for_the_farm_it_is_for() -> None:
    work = scenarios.day_work()
    due = sum(part.frames * part.cores[0] * 5.0 for part in work if part.at >= 1)
    asked = due / (scenarios.STEADY.cores * 23)
    assert asked == pytest.approx(0.95, abs=0.03)
    assert {part.cores[0] for part in work} == {1, 2, 4, 8, 16, 32, 64}


# Answers


def scenario_of(judge: Any, **how: Any) -> Scenario:
    return Scenario("name", "says", (), (), (), 1, judge, **how)


def test_a_scenario_passes_when_every_figure_is_kept_and_the_audit_is_clean() -> None:
    fine, broken = scenario_of(lambda _: [Bound("x", 1, 1, 2)]), scenario_of(lambda _: [Bound("x", 3, 1, 2)])
    assert decisions.judge(fine, 1, record_of()).right
    assert not decisions.judge(broken, 1, record_of()).right
    assert not decisions.judge(fine, 1, record_of(audit=["counters-match-ledger"])).right


def test_a_control_is_right_when_its_judge_fails_it() -> None:
    for value, right in ((1, False), (3, True)):
        scenario = scenario_of(lambda _, value=value: [Bound("x", value, 1, 2)], control=Control("off", "x"))
        answer = decisions.judge_control(scenario, 1, lambda *_: record_of())
        assert answer is not None
        assert answer.right is right


def test_a_control_that_fails_for_another_reason_shows_nothing() -> None:
    bounds = [Bound("x", 1, 1, 2), Bound("utilisation", 0, 1)]
    scenario = scenario_of(lambda _: bounds, control=Control("off", "x"))
    answer = decisions.judge_control(scenario, 1, lambda *_: record_of())
    assert answer is not None
    assert not answer.right


def test_a_control_names_a_figure_of_its_judge() -> None:
    marks = {event.name: event.at for scenario in scenarios.SCENARIOS for event in scenario.events}
    hosts = {"h1": Machine("h1", "cpu", 16, 4), "h2": Machine("h2", "gpu", 16, 4)}
    record = replace(record_of(run_of(), seconds=60.0, marks=marks), hosts=hosts)
    for scenario in scenarios.SCENARIOS:
        names = {bound.name for bound in scenario.judge(record)}
        assert {control.fails for control in scenario.controls} <= names, scenario.name


def test_a_control_whose_switch_is_not_there_is_skipped_and_says_so() -> None:
    scenario = scenario_of(lambda _: [], control=Control("off", "x", queue={"no_such_setting": "false"}))

    def never(*_: Any) -> Record:
        raise AssertionError("played")

    answer = decisions.judge_control(scenario, 1, never)
    assert answer is not None
    assert (answer.verdict, answer.right) == ("skipped", True)
    assert "queue.no_such_setting" in answer.note


def test_a_control_is_the_same_run_with_other_settings() -> None:
    control = Control("off", "x", queue={"worker_threads": "2"}, changes={"capped": False})
    changed, missing = decisions.control_of(scenario_of(lambda _: [], queue={"metrics_port": "0"}, control=control))
    assert changed is not None
    assert (changed.queue, changed.capped, missing) == ({"metrics_port": "0", "worker_threads": "2"}, False, [])


def test_answers_are_json_also_where_a_figure_is_infinite() -> None:
    def figures() -> Iterator[Bound]:
        yield Bound("ratio", float("inf"), most=1.5)

    answer = decisions.judge(scenario_of(lambda _: list(figures())), 4, record_of())
    shown = json.loads(json.dumps(answer.as_dict(), allow_nan=False))
    assert shown["figures"]["ratio"] == {"value": None, "least": None, "most": 1.5, "kept": False}


def test_scenarios_are_chosen_by_name_in_their_own_order() -> None:
    assert [it.name for it in decisions.chosen(["wide", "shares-two"])] == ["shares-two", "wide"]
    assert len(decisions.chosen([])) == len(scenarios.SCENARIOS)
