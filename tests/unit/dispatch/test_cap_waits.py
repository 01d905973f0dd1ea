"""Which clusters are roused when there is room under a cap: those that waited longest, and no more than it is for."""

from __future__ import annotations

from dataclasses import replace

from opencue_sched.dispatch.cooldown import MOST_CLUSTERS, WAITS_OF_A_CLUSTER, CapWait, CapWaits, waits_of
from opencue_sched.domain.cluster import LayerVerdict, Verdict
from opencue_sched.domain.farm import Caps, Headroom
from opencue_sched.store.pending import CapHeadroom, CapKind, Capped
from tests.unit.placement.values import make_caps, make_job, make_layer, make_snapshot

SEAT = CapHeadroom(1, 0)
LICENCE, OTHER, JOB = Capped(CapKind.LIMIT, "arnold"), Capped(CapKind.LIMIT, "maya"), Capped(CapKind.JOB, "j1")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        self.now += 0.001
        return self.now


def waiting(**clusters: CapWait) -> CapWaits:
    waits = CapWaits(5.0, Clock())
    for cluster, wait in clusters.items():
        waits.note(cluster, [wait])
    return waits


def test_as_many_as_there_are_seats_are_roused_in_the_order_in_which_they_began_to_wait() -> None:
    waits = waiting(first=CapWait(LICENCE, SEAT), other=CapWait(OTHER, SEAT), second=CapWait(LICENCE, SEAT))
    waits.note("third", [CapWait(LICENCE, SEAT)])
    waits.note("first", [CapWait(LICENCE, SEAT)])
    assert waits.caps() == {LICENCE, OTHER}
    assert waits.with_headroom({LICENCE: CapHeadroom(0, 0), OTHER: CapHeadroom(0, 0)}) == frozenset()
    assert waits.with_headroom({LICENCE: CapHeadroom(1, 0)}) == {"first"}
    assert waits.with_headroom({LICENCE: CapHeadroom(2, 0), OTHER: CapHeadroom(9, 0)}) == {"first", "second", "other"}

    waits.forget(["first", "nobody"])
    assert waits.with_headroom({LICENCE: CapHeadroom(1, 0)}) == {"second"}
    # and who was roused in vain stands behind the others
    waits.note("first", [CapWait(LICENCE, SEAT)])
    assert waits.with_headroom({LICENCE: CapHeadroom(2, 0)}) == {"second", "third"}


def test_room_that_is_too_little_for_one_is_left_to_the_next() -> None:
    waits = waiting(
        large=CapWait(JOB, CapHeadroom(4, 0)),
        gpus=CapWait(JOB, CapHeadroom(1, 1)),
        small=CapWait(JOB, CapHeadroom(2, 0)),
    )
    assert waits.with_headroom({JOB: CapHeadroom(3, 0)}) == {"small"}
    assert waits.with_headroom({JOB: CapHeadroom(float("inf"), 1)}) == {"large", "gpus", "small"}


def test_what_nobody_says_again_is_forgotten_and_what_is_kept_is_bounded() -> None:
    clock = Clock()
    waits = CapWaits(5.0, clock)
    waits.note("quiet", [CapWait(LICENCE, SEAT)])
    waits.note("nothing", [])
    clock.now += 3
    waits.note("heard", [CapWait(OTHER, SEAT)])
    clock.now += 3
    waits.note("heard", [CapWait(Capped(CapKind.LIMIT, str(n)), SEAT) for n in range(100)])
    assert LICENCE not in waits.caps()
    assert OTHER in waits.caps()
    assert len(waits.caps()) == WAITS_OF_A_CLUSTER
    for n in range(2 * MOST_CLUSTERS):
        waits.note(f"cluster{n}", [CapWait(LICENCE, SEAT)])
    assert len(waits.with_headroom({LICENCE: CapHeadroom(float("inf"), 0)})) == MOST_CLUSTERS - 1


def test_a_layer_waits_at_the_cap_its_verdict_names_if_that_had_too_little_for_it() -> None:
    limits = {"free": Headroom(2, 1), "full": Headroom(2, 2)}
    said = [
        ("folder", Verdict.OVER_FOLDER),
        ("job", Verdict.OVER_JOB_GPUS),
        ("limit", Verdict.OVER_LIMIT),
        ("refused", Verdict.OVER_LIMIT),
        ("host", Verdict.NO_HOST),
        ("left-out", Verdict.OVER_JOB),
    ]
    layers = {name: make_layer(name, cores=2, gpus_min=1) for name, _ in said[:-1]}
    layers["limit"] = replace(layers["limit"], limit_ids=("free", "full", "unknown"))
    layers["refused"] = replace(layers["refused"], limit_ids=("free",))
    verdicts = [LayerVerdict("j1", name, verdict, 0, 1, "") for name, verdict in said]
    job = make_job("j1", list(layers.values()), folder_id="f1")

    def waits(folder: Caps, of_job: Caps) -> list[CapWait]:
        snapshot = make_snapshot(job, folders={"f1": folder}, job_caps={"j1": of_job}, limits=limits)
        return list(waits_of(verdicts, snapshot))

    licence = CapWait(Capped(CapKind.LIMIT, "full"), SEAT)
    assert waits(make_caps(4, booked=3), make_caps(gpus=0)) == [
        CapWait(Capped(CapKind.FOLDER, "f1"), CapHeadroom(2, 1)),
        CapWait(JOB, CapHeadroom(2, 1)),
        licence,
    ]
    # a host may want more cores for a frame than the least, and the counters may be ahead: no room is waited for then
    assert waits(make_caps(4, booked=2), make_caps(4, gpus=1, booked=2)) == [licence]
    uncapped = make_snapshot(job, limits=limits)
    assert list(waits_of(verdicts, uncapped)) == [licence]
