"""The judges of scenarios of licences, on records of which the answer is known, and the licence server they play."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest

from benchmarks.decisions import licences
from benchmarks.decisions import record as of
from benchmarks.decisions.licence_server import LicenceServer
from benchmarks.decisions.record import Denial, Layer, Machine, Record, Run, Seated, Use
from benchmarks.decisions.scenario import Licence, Scenario

HOUDINI = Layer("houdini", "houdini", "licensed", 0, 1, licences=("houdini",))
FLOOD = Layer("flood", "flood", "flood", 0, licences.SMALL)
QUIET = {"dead frames": 0.0, "retries used": 0.0}


def frames_on(host: str, count: int, began: float, ended: float | None = None, layer: Layer = HOUDINI) -> list[Run]:
    return [
        Run(f"{layer.id}-{host}-{began}-{number}", layer, host, layer.cores, began, ended) for number in range(count)
    ]


def record_of(*runs: list[Run], seconds: float = 60.0, large: int = 8, **how: Any) -> Record:
    farm = {f"h{number}": Machine(f"h{number}", "large", licences.LARGE) for number in range(1, large + 1)}
    return Record(seconds, farm, [run for some in runs for run in some], **how)


def seated(farm: int, artists: int, at: float = 0.0) -> Seated:
    return Seated(at, "houdini", farm, artists)


def kept(bounds: Any) -> dict[str, bool]:
    return {bound.name: bound.kept for bound in bounds}


# Figures


def test_a_machine_holds_a_licence_from_its_first_frame_to_the_end_of_its_last() -> None:
    runs = frames_on("h1", 2, 1.0, 5.0), frames_on("h1", 1, 4.0, 8.0), frames_on("h2", 1, 8.0)
    record = record_of(*runs, frames_on("h3", 1, 1.0, layer=FLOOD), seated=[seated(0, 1, at=6.0)])

    used = of.uses(record, "houdini")

    assert used[-1] == Use(8.0, 1, 1, 1), "of one moment, what ends comes first"
    assert of.most_used(used, 0.0, 60.0, lambda use: use.frames) == 3
    assert of.most_used(used, 0.0, 60.0, lambda use: use.machines + use.artists) == 2
    assert of.most_used(used, 6.5, 7.5, lambda use: use.machines + use.artists) == 2, "since before the window"
    assert of.most_used(used, 5.5, 6.0, lambda use: use.machines + use.artists) == 1
    assert of.mean_use(used, 0.0, 10.0, lambda use: use.frames) == pytest.approx(1.4)


# Judges


def seats(frames_a_seat: int = 12, machines: int = 6, artists: int = 2, **how: Any) -> Record:
    runs = [frames_on(f"h{number}", frames_a_seat, 5.0) for number in range(1, machines + 1)]
    return record_of(*runs, seated=[seated(machines, artists, at=6.0)], found=QUIET, **how)


def test_seats_are_never_more_than_there_are_and_run_five_frames_each() -> None:
    assert kept(licences.judge_seats(seats()))["most houdini seats"]
    assert not kept(licences.judge_seats(seats(artists=3)))["most houdini seats"]
    assert not kept(licences.judge_seats(seats(machines=7, artists=0)))["most houdini machines"]
    assert kept(licences.judge_seats(seats()))["frames a houdini seat"]
    assert not kept(licences.judge_seats(seats(frames_a_seat=3)))["frames a houdini seat"]
    assert not kept(licences.judge_seats(seats(frames_a_seat=6, machines=1)))["frames a houdini seat"]
    denied = seats(denials=[Denial(7.0, "houdini", "houdini")])
    assert not kept(licences.judge_seats(denied))["frames denied"]


def denied(**how: Any) -> Record:
    marks = {"artists take the last seats": 16.5, "artists go": 62.0}
    held = [seated(4, 0), seated(4, 2, at=16.5), seated(4, 0, at=62.0), seated(6, 0, at=75.0)]
    values: dict[str, Any] = {
        "marks": marks,
        "seated": held,
        "denials": [Denial(16.5, "houdini", "houdini")],
        "found": QUIET,
        "seconds": 100.0,
    }
    return record_of(**{**values, **how})


def test_what_is_denied_waits_and_the_others_use_what_there_is() -> None:
    again = frames_on("h1", 1, 77.0)

    def fails(**wrong: Any) -> set[str]:
        runs = wrong.pop("runs", again)
        record = replace(denied(**wrong), runs=runs)
        whole_farm = {"utilisation", "part of the cores with the flood"}
        return {name for name, is_kept in kept(licences.judge_denied(record)).items() if not is_kept} - whole_farm

    assert fails() == set()
    assert "frames denied" in fails(denials=[])
    assert "frames denied once it is known" in fails(denials=[Denial(40.0, "houdini", "houdini")])
    assert "seats in use with the artists" in fails(seated=[seated(2, 2)])
    assert "most houdini seats" in fails(seated=[seated(5, 2)])
    assert "dead frames" in fails(found={**QUIET, "dead frames": 1.0})
    assert "retries used" in fails(found={**QUIET, "retries used": 1.0})
    assert {"dead frames", "retries used"} <= fails(found={})
    assert "starts of layers that are to wait" in fails(runs=frames_on("h1", 1, 60.0))
    assert "layers denied that start again" in fails(runs=[])


def silence(machines: int, at: float, denied_at: float = 80.0, **found: float) -> Record:
    runs = [frames_on(f"h{number}", 4, at) for number in range(1, machines + 1)]
    told = {"doctor says so": 1.0, "doctor says so after a report": 0.0}
    return record_of(
        *runs,
        seconds=124.0,
        large=12,
        marks={"reports stop": 16.5, "reports come again": 91.0},
        reports=[(8.0, "houdini"), (16.0, "houdini"), (92.0, "houdini"), (100.0, "houdini")],
        denials=[Denial(denied_at, "houdini", "other")],
        found={**QUIET, **told, **found},
    )


def test_silence_opens_a_limit_after_its_time_to_live_and_no_sooner() -> None:
    assert not kept(licences.judge_silence(silence(9, at=50.0)))["most houdini seats before it opens"]
    assert kept(licences.judge_silence(silence(9, at=80.0)))["most houdini seats before it opens"]
    assert kept(licences.judge_silence(silence(6, at=100.0)))["most houdini seats afterwards"]
    assert not kept(licences.judge_silence(silence(9, at=110.0)))["most houdini seats afterwards"]
    assert not kept(licences.judge_silence(silence(1, at=50.0, denied_at=60.0)))["frames denied before it opens"]
    assert not kept(licences.judge_silence(silence(1, at=50.0, denied_at=60.0)))["frames denied while it is open"]
    assert not kept(licences.judge_silence(silence(1, at=50.0, denied_at=110.0)))["frames denied once it is enforced"]
    assert not kept(licences.judge_silence(silence(1, at=50.0, **{"doctor says so": 0.0})))["doctor says so"]


def lowered(left: int, frames_after: int = 12, others: bool = True) -> Record:
    six, at = [f"h{number}" for number in range(1, 7)], 26.0
    runs = [frames_on(host, 12, 5.0, at + 5.0) for host in six]
    runs += [frames_on(host, frames_after, at + 5.0) for host in six[:left]]
    if others:
        runs += [frames_on(host, 4, at + 5.0, layer=FLOOD) for host in six[left:]]
    return record_of(*runs, marks={"the maximum is lowered": at}, found=QUIET, seconds=52.0)


def test_a_lowered_maximum_leaves_three_machines_filled_and_three_to_others() -> None:
    def fails(record: Record) -> set[str]:
        whole_farm = {"utilisation", "part of the cores with the flood"}
        return {name for name, is_kept in kept(licences.judge_lowered(record)).items() if not is_kept} - whole_farm

    assert fails(lowered(3)) == set()
    assert "machines two frame times after it" in fails(lowered(4))
    assert "machines two frame times after it" in fails(lowered(2))
    assert "frames a seat after to before" in fails(lowered(3, frames_after=8))
    assert "part of their cores in use" in fails(lowered(3, others=False))


def test_counts_lose_few_bookings() -> None:
    name = "bookings lost by changes, %"
    few, many = ({**QUIET, "lost: cap_changing": count} for count in (1.0, 3.0))
    runs = [frames_on("h1", 98, 5.0)]
    assert kept(licences.judge_counts(record_of(*runs, found=few)))[name]
    assert not kept(licences.judge_counts(record_of(*runs, found=many)))[name]


# Licence servers


def server_of(**products: Licence) -> LicenceServer:
    return LicenceServer(Mock(), products)


def under(*products: str) -> Layer:
    return replace(HOUDINI, licences=products)


def test_a_seat_of_machines_serves_all_frames_of_its_machine() -> None:
    server = server_of(houdini=Licence(2, machines=True, seats=2, exit_status=330))

    assert [server.ask(f"p{number}", host, HOUDINI) for number, host in enumerate("aabbc")] == [True] * 4 + [False]

    assert server.give_back("p4") == 330, "it was denied"
    assert [server.give_back(proc) for proc in ("p0", "p0", "p1")] == [0, 0, 0]
    assert server.ask("p5", "c", HOUDINI), "the last frame has given the seat back"
    assert [(farm, artists) for _, _, farm, artists in server.seated] == [
        (1, 0),
        (1, 0),
        (2, 0),
        (2, 0),
        (2, 0),
        (1, 0),
        (2, 0),
    ]


def test_artists_take_what_is_free_alone_and_frames_what_they_leave() -> None:
    server = server_of(nuke=Licence(3, seats=3, exit_status=331))
    assert server.ask("p1", "a", under("nuke"))
    server.artists_come("nuke", 5)
    assert not server.ask("p2", "a", under("nuke"))
    assert server.seated[-1][2:] == (1, 2)
    server.artists_go("nuke")
    assert server.ask("p3", "a", under("nuke"))


def test_a_frame_under_two_products_gets_both_or_none() -> None:
    both: Mapping[str, Licence] = {"a": Licence(1, seats=1, exit_status=330), "b": Licence(1, seats=1, exit_status=331)}
    server = server_of(**both)
    assert server.ask("p1", "host", under("b"))
    assert not server.ask("p2", "host", under("a", "b"))
    assert [(product, layer) for _, product, layer in server.denials] == [("b", HOUDINI.id)]
    assert server.give_back("p2") == 331
    assert server.ask("p3", "host", under("a"))


# Declarations


@pytest.mark.parametrize("scenario", licences.LICENCES, ids=lambda scenario: scenario.name)
def test_the_farms_are_large_enough_for_four_shards_and_no_status_means_two_limits(scenario: Scenario) -> None:
    assert sum(hosts.count for hosts in scenario.hosts) >= 256
    assert scenario.sharded
    statuses = [licence.exit_status for licence in scenario.licences.values()]
    assert len(set(statuses)) == len(statuses)
