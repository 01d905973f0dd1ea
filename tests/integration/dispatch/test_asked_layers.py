"""Passes that ask for small layers as wholes: each gets what no other pass has, and leaves the rest alone."""

from __future__ import annotations

import pytest
import redis

from opencue_sched.coordination.permits import FramePermits
from opencue_sched.dispatch.whole_layers import FEWEST_LAYERS, WholeLayers
from opencue_sched.domain.plans import Waiting
from tests.kit.values import GivenWork, make_cluster, make_job, make_layer

LONG_SECONDS = 300.0
"""Longer than any machine stands still."""
MOST_FRAMES = 4
"""So many frames of a small layer wait at most."""


class AskingPass:
    """A pass over ``work``, as far as it asks for layers."""

    def __init__(self, permits: FramePermits, owner: str, work: GivenWork) -> None:
        self.left_alone: set[str] = set()
        self.whole = WholeLayers(permits, [work], self.left_alone, owner, most_frames=MOST_FRAMES, seconds=LONG_SECONDS)

    def gets(self, wanted: list[Waiting]) -> list[str]:
        """Ask for layers; the ids of those whose frames the pass may read."""
        return [waiting.layer.id for waiting in self.whole.ask(wanted)]


@pytest.fixture
def permits(redis_client: redis.Redis) -> FramePermits:
    return FramePermits(redis_client, "cue")


def work_of(layers: int, *, frames: int = MOST_FRAMES) -> GivenWork:
    """Jobs of one layer each, called layer0, layer1 and so on."""
    names = [str(number) for number in range(layers)]
    jobs = [make_job(f"job{name}", [make_layer(f"layer{name}", waiting_frames=frames)]) for name in names]
    return GivenWork((make_cluster("general"),), tuple(jobs))


def test_a_layer_that_another_pass_was_given_is_neither_read_nor_planned(permits: FramePermits) -> None:
    # given a few small layers, of which another pass was given two
    work = work_of(3)
    first, second, third = work
    faster, slower = AskingPass(permits, "faster", work), AskingPass(permits, "slower", work)
    assert faster.gets([first, second]) == ["layer0", "layer1"]

    # when a pass asks for all of them, then it may read the third, and plans no frame of the others
    assert slower.gets([first, second, third]) == ["layer2"]
    assert slower.left_alone == {"layer0", "layer1"}
    assert slower.whole.leaves_some

    # and the faster one goes on with what it has, and leaves the third
    assert faster.gets([first, second, third]) == ["layer0", "layer1"]
    assert faster.left_alone == {"layer2"}


def test_a_pass_that_is_refused_one_layer_leaves_the_other_passs_next_ones_too(permits: FramePermits) -> None:
    # given many small layers, of which another pass was given the first ten
    work = work_of(FEWEST_LAYERS)
    faster, slower = AskingPass(permits, "faster", work), AskingPass(permits, "slower", work)
    faster.gets(list(work)[:10])

    # when a pass asks for the first, then it leaves all ten
    assert slower.gets(list(work)[:1]) == []
    assert slower.left_alone == {f"layer{number}" for number in range(10)}


def test_a_large_layer_is_served_by_all_passes(permits: FramePermits) -> None:
    work = work_of(1, frames=MOST_FRAMES + 1)
    for owner in ("faster", "slower"):
        asking = AskingPass(permits, owner, work)
        assert asking.gets(list(work)) == ["layer0"]
        assert asking.left_alone == set()
