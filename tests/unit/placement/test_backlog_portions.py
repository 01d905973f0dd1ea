"""The portions of frames of the backlog: when they are read, and what is planned of them."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opencue_sched.domain.shards import bucket_of, buckets
from opencue_sched.placement.backlog import FIRST_FRAMES_OF_A_PORTION, PORTION_SECONDS
from tests.kit.examples import examples
from tests.kit.frozen_clock import Clock
from tests.unit.placement.known_backlog import Known, frames_of, proc, waiting_layer

NEXT_FRAMES = 200
"""A frame that is retried is among so many of its layer that are started next."""


class TestPortions:
    def test_frames_are_read_when_a_plan_comes_to_them_and_again_when_they_are_old(self) -> None:
        known, layer = Known(), waiting_layer()
        known.read(layer)
        assert known.frames(layer) is None

        known.read_portion("l1", 1, 2, waiting=5)
        assert known.frames(layer) == ["l1-f1", "l1-f2"]

        known.clock.now += PORTION_SECONDS + 1
        assert known.frames(layer) is None

    def test_what_is_in_flight_is_not_planned_again_and_what_is_not_booked_waits_as_before(self) -> None:
        known, layer = Known(), waiting_layer()
        known.read(layer)
        known.read_portion("l1", 1, 2, 3, waiting=5)
        first, second = (proc(layer, frame) for frame in frames_of("l1", 1, 2))

        known.backlog.take([first, second])
        assert known.frames(layer) == ["l1-f3"]

        known.backlog.settle([first, second], booked={first.proc_id})
        assert known.frames(layer) == ["l1-f2", "l1-f3"]

    def test_a_portion_that_is_used_up_is_read_again(self) -> None:
        known, layer = Known(), waiting_layer(waiting=5)
        known.read(layer)
        known.read_portion("l1", 1, waiting=5)
        only = proc(layer, *frames_of("l1", 1))
        known.backlog.take([only])
        known.backlog.settle([only], booked={only.proc_id})

        assert known.frames(layer) is None

    @pytest.mark.parametrize("overtaken", [False, True], ids=["in time", "overtaken by a later count"])
    def test_a_read_that_began_before_a_commit_brings_nothing_back(self, overtaken: bool) -> None:
        known, layer = Known(), waiting_layer(waiting=2)
        known.read(layer)
        known.read_portion("l1", 1, 2)
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        before = known.backlog.instant()
        known.backlog.settle([booked], booked={booked.proc_id})
        if overtaken:
            known.backlog.apply_counts({"l1": 1}, read_at=known.backlog.instant())

        known.backlog.apply_portion("l1", 2, frames_of("l1", 1, 2), None, read_at=before)

        assert known.frames(layer) == ["l1-f2"]

    def test_a_read_that_began_before_its_layer_was_found_anew_brings_nothing_back(self) -> None:
        known, layer = Known(), waiting_layer(waiting=1)
        known.read(layer)
        known.read_portion("l1", 1)
        before = known.backlog.instant()
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        known.backlog.settle([booked], booked={booked.proc_id})
        known.backlog.apply([], gone=["l1"], read_at=known.backlog.instant())
        known.read(layer)

        known.backlog.apply_portion("l1", 1, frames_of("l1", 1), None, read_at=before)

        assert not known.work().has_portion(layer)

    def test_a_frame_that_waits_again_is_planned_again(self) -> None:
        known, layer = Known(), waiting_layer(waiting=2)
        known.read(layer)
        known.read_portion("l1", 1, 2)
        booked = proc(layer, *frames_of("l1", 1))
        known.backlog.take([booked])
        known.backlog.settle([booked], booked={booked.proc_id})

        known.read_portion("l1", 1, 2)

        assert known.frames(layer) == ["l1-f1", "l1-f2"]

    def test_a_process_takes_the_frames_of_its_own_buckets_first_and_those_of_others_from_the_last_on(self) -> None:
        known, layer = Known(), waiting_layer(waiting=9)
        known.read(layer)
        known.read_portion("l1", *range(1, 10))
        own = frozenset({bucket_of("l1-f5"), bucket_of("l1-f7")})

        portion = known.work(own=own).portion(layer)

        assert portion is not None
        assert [frame.id for frame in portion] == [f"l1-f{number}" for number in (5, 7, 9, 8, 6, 4, 3, 2, 1)]

    def test_however_many_frames_are_in_flight_no_more_than_two_hundred_others_are_read(self) -> None:
        known, layer = Known(), waiting_layer(waiting=2_000)
        known.read(layer)
        for in_flight in (0, NEXT_FRAMES, 2 * NEXT_FRAMES):
            known.read_portion("l1", *range(1, 1_001), waiting=2_000)
            portion = known.work().portion(layer)
            assert portion is not None
            assert [frame.number for frame in portion] == list(range(in_flight + 1, in_flight + NEXT_FRAMES + 1))
            known.backlog.take([proc(layer, frame) for frame in portion])
            assert known.backlog.portion_sizes(known.work())["l1"] == in_flight + 2 * NEXT_FRAMES

    def test_the_next_read_has_as_many_frames_as_the_last_plan_booked(self) -> None:
        known, layer = Known(), waiting_layer(waiting=2_000)
        known.read(layer)
        for booked, read in ((3 * FIRST_FRAMES_OF_A_PORTION, 3 * FIRST_FRAMES_OF_A_PORTION), (1, 20), (300, 200)):
            planned = [proc(layer, frame) for frame in frames_of("l1", *range(booked))]
            known.backlog.take(planned)
            known.backlog.settle(planned, booked={one.proc_id for one in planned})
            assert known.backlog.portion_sizes(known.work())["l1"] == read

    def test_frames_that_others_have_the_permits_of_are_left_to_them_for_a_while(self) -> None:
        known, layer = Known(), waiting_layer(waiting=3)
        known.read(layer)
        known.read_portion("l1", 1, 2, 3)
        refused = proc(layer, *frames_of("l1", 1))

        known.backlog.settle([refused], taken={refused.proc_id})
        known.read_portion("l1", 1, 2, 3)
        assert known.frames(layer) == ["l1-f2", "l1-f3"]
        assert known.backlog.portion_sizes(known.work())["l1"] > FIRST_FRAMES_OF_A_PORTION, (
            "so that as many others are read"
        )

        known.clock.now += PORTION_SECONDS + 1
        known.read_portion("l1", 1, 2, 3)
        assert known.frames(layer) == ["l1-f1", "l1-f2", "l1-f3"]


@dataclass
class Served:
    """A layer that planners of some shards start frames of; those of the other shards have no hosts for it."""

    division: tuple[str, ...]
    serving: int
    waiting: set[int] = field(default_factory=lambda: set(range(1, 401)))
    started: list[int] = field(default_factory=list)
    clock: Clock = field(default_factory=Clock)

    def __post_init__(self) -> None:
        self.planners = [Known(self.clock) for _ in range(self.serving)]

    def start(self, planner: int, most: int) -> None:
        """A pass of one planner, which finds hosts for so many frames. It cannot have those that another started."""
        known, layer = self.planners[planner], waiting_layer(waiting=len(self.waiting))
        own = buckets(self.division[planner], self.division)
        known.read(layer)
        for _ in range(3):
            if not self.waiting or most <= 0:
                return
            if not known.work().has_portion(layer):
                size = known.backlog.portion_sizes(known.work())["l1"]
                known.read_portion("l1", *sorted(self.waiting)[:size], waiting=len(self.waiting))
            planned = [proc(layer, frame) for frame in (known.work(own=own).portion(layer) or ())[:most]]
            had = {one.proc_id for one in planned if one.frame.number in self.waiting}
            known.backlog.take(planned)
            known.backlog.settle(planned, booked=had, taken={one.proc_id for one in planned} - had)
            for one in planned:
                if one.proc_id in had:
                    self.waiting.remove(one.frame.number)
                    self.started.append(one.frame.number)
            most -= len(had)


@settings(max_examples=examples(40), deadline=None)
@given(
    farm=st.sampled_from([(2, 1), (2, 2), (3, 1), (3, 2), (8, 1)]),
    passes=st.lists(st.tuples(st.integers(1, 40), st.integers(0, 12)), min_size=1, max_size=8),
)
def test_no_frame_is_behind_more_of_its_layer_than_a_portion_has(
    farm: tuple[int, int], passes: list[tuple[int, int]]
) -> None:
    # given a layer for which some shards have hosts, and the others have none or are full
    shards, serving = farm
    served = Served(tuple(f"w{number}" for number in range(shards)), serving)

    # when their planners start what they find hosts for, and the first frame is retried once
    turn, retried_at = 0, 0
    while served.waiting:
        frames, seconds = passes[turn // serving % len(passes)]
        served.start(turn % serving, frames)
        if not retried_at and 1 in served.started and len(served.started) >= 100:
            served.waiting.add(1)
            retried_at = len(served.started)
        served.clock.now += seconds
        turn += 1

    # then each starts no more than a portion later than in the order of the layer
    places = {number: place for place, number in reversed(list(enumerate(served.started, 1)))}
    assert max(places[number] - number for number in places) <= NEXT_FRAMES
    again = len(served.started) - served.started[::-1].index(1)
    assert again - retried_at <= NEXT_FRAMES
