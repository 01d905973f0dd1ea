"""Which show goes on next, and whose turn it is in the drawn part of a show."""

from __future__ import annotations

from collections import Counter
from itertools import count

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.shards import place_of
from opencue_sched.placement.policies.order import Shares, Use, VirtualTimes
from tests.kit.values import make_caps

sizes = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50), min_size=1)


def served(draw: VirtualTimes, priorities: dict[str, int], turns: int, *, cores: int = 1) -> Counter[str]:
    """How many cores each job gets of so many turns, all of which are drawn."""
    got = Counter[str]()
    for _ in range(turns):
        _, job_id = min(draw.times(priorities))
        draw.served(job_id, cores, priorities[job_id])
        got[job_id] += cores
    return got


@given(st.floats(0, 1), st.lists(st.integers(1, 9), min_size=50, max_size=80))
def test_the_part_of_the_cores_is_drawn(part: float, cores_of_turns: list[int]) -> None:
    draw, drawn, total = VirtualTimes(), 0, 0
    for cores in cores_of_turns:
        is_drawn = draw.is_due(part)
        draw.count(cores, drawn=is_drawn)
        drawn, total = drawn + cores * is_drawn, total + cores
    assert part * total - 9 <= drawn <= part * total + 9


def test_nothing_and_everything_can_be_drawn() -> None:
    draw = VirtualTimes()
    assert (draw.is_due(0), draw.is_due(1)) == (False, True)
    draw.count(5, drawn=True)
    assert (draw.is_due(0), draw.is_due(1)) == (False, True)


@given(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 20), min_size=2))
def test_jobs_are_drawn_in_the_measure_of_their_priority(priorities: dict[str, int]) -> None:
    turns = 20 * sum(priorities.values())
    got = served(VirtualTimes(), priorities, turns)
    assert all(abs(got[job_id] - 20 * priority) <= priority + 2 for job_id, priority in priorities.items())


def test_a_job_that_comes_back_has_saved_no_credit() -> None:
    # given two jobs that were served alike, of which one then has nothing that waits while the other gets a lot
    draw, both = VirtualTimes(), {"a": 1, "b": 1}
    served(draw, both, 10)
    draw.left("a")
    served(draw, {"b": 1}, 100)

    # when it comes back, then both are served alike again
    got = served(draw, both, 20)
    assert abs(got["a"] - got["b"]) <= 2


def test_the_planners_of_four_shards_serve_each_job_as_soon_as_one_would() -> None:
    # given four planners, which know nothing of each other
    priorities = {f"j{number}": 100 if number % 2 else 50 for number in range(400)}
    division = ("w1", "w2", "w3", "w4")
    planners = [VirtualTimes(place_of(shard, division)) for shard in division]
    first: dict[str, int] = {}
    # when each of them has a turn, again and again
    for turn in count():
        for planner in planners:
            _, job_id = min(planner.times(priorities))
            planner.served(job_id, 4, priorities[job_id])
            first.setdefault(job_id, 4 * turn)
        if len(first) == 400:
            break
    # then each job of a priority has had one when its part of all turns is one, or soon after
    for priority in (50, 100):
        due = sum(priorities.values()) / priority
        latest = max(at for job_id, at in first.items() if priorities[job_id] == priority)
        assert latest <= 1.25 * due


def shares_of(cores_by_show: dict[str, int], size_by_show: dict[str, int]) -> Shares:
    subscriptions = {(show, "alloc"): make_caps(1e9, booked=cores) for show, cores in cores_by_show.items()}
    return Shares(subscriptions, {(show, "alloc"): float(size) for show, size in size_by_show.items()})


@given(sizes)
def test_to_serve_who_uses_least_of_its_size_gives_each_its_share(size_by_show: dict[str, int]) -> None:
    shares = shares_of(dict.fromkeys(size_by_show, 0), size_by_show)
    total = sum(size_by_show.values())
    got = dict.fromkeys(size_by_show, 0)
    for _ in range(total):
        show = min(got, key=shares.use)
        shares.take(show, "alloc", 1)
        got[show] += 1
    assert got == size_by_show


@given(sizes, st.integers(0, 30))
def test_a_show_without_a_size_comes_after_all_that_have_one(size_by_show: dict[str, int], cores: int) -> None:
    shares = shares_of({**dict.fromkeys(size_by_show, cores), "none": 0}, {**size_by_show, "none": 0})
    sized = [show for show, size in size_by_show.items() if size]
    assert all(shares.use(show) < shares.use("none") for show in sized)


def test_what_is_used_counts_where_the_work_runs() -> None:
    subscriptions = {("show", "here"): make_caps(99, booked=5), ("show", "there"): make_caps(99, booked=30)}
    shares = Shares(subscriptions, {("show", "here"): 10.0, ("show", "there"): 10.0})
    assert shares.use("show", "here") == Use(False, 0.5)
    assert shares.use("show") == Use(False, 1.75)
