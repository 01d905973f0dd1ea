"""Which show goes on next, and which epochs of a show go by draw."""

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.placement.policies.order import EPOCH_SECONDS, Shares, Use, seed_of_draw
from tests.kit.values import make_caps

EPOCHS = 400

sizes = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 50), min_size=1)


def drawn(part: float, *, show: str = "show", shard: str = "") -> list[str]:
    seeds = [seed_of_draw(show, shard, epoch * EPOCH_SECONDS, part) for epoch in range(EPOCHS)]
    return [seed for seed in seeds if seed]


@given(st.floats(0, 1), st.text(max_size=8), st.sampled_from(["", "w1", "w2"]))
def test_the_part_of_the_epochs_is_drawn_whatever_the_show(part: float, show: str, shard: str) -> None:
    seeds = drawn(part, show=show, shard=shard)
    assert abs(len(seeds) - part * EPOCHS) <= 1
    assert len(set(seeds)) == len(seeds), "each epoch draws anew"


def test_nothing_and_everything_can_be_drawn() -> None:
    assert drawn(0) == []
    assert len(drawn(1)) == EPOCHS


@given(st.floats(0, 1), st.floats(0, 1e9), st.floats(0, 0.999))
def test_all_passes_of_an_epoch_draw_alike(part: float, epoch: float, later: float) -> None:
    begun = math.floor(epoch) * EPOCH_SECONDS
    seed = seed_of_draw("show", "w1", begun, part)
    assert seed_of_draw("show", "w1", begun + later * EPOCH_SECONDS, part) == seed
    assert not seed or seed_of_draw("show", "w2", begun, 1) != seed, "shards draw apart"


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
