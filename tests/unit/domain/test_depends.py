"""Which frames wait for which, and circles of layers that never end."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.depends import ChunkedRange, DependType, frame_pairs, waiting_circle
from opencue_sched.domain.frame_range import FrameRange

LAYER, FRAME, PREVIOUS = DependType.LAYER_ON_LAYER, DependType.FRAME_BY_FRAME, DependType.PREVIOUS_FRAME


def frames(text: str, chunk_size: int = 1) -> ChunkedRange:
    return ChunkedRange(FrameRange.parse(text), chunk_size)


def test_frame_by_frame_pairs_equal_numbers() -> None:
    assert frame_pairs(FRAME, frames("1-3"), frames("1-3")) == ((1, 1), (2, 2), (3, 3))


def test_a_frame_without_a_counterpart_waits_for_nothing() -> None:
    assert frame_pairs(FRAME, frames("1-3"), frames("2-9")) == ((2, 2), (3, 3))
    assert frame_pairs(FRAME, frames("1-3"), frames("7-9")) == ()


def test_a_chunk_waits_for_every_frame_it_needs() -> None:
    assert frame_pairs(FRAME, frames("1-4", 2), frames("1-4")) == ((1, 1), (1, 2), (3, 3), (3, 4))


def test_a_frame_waits_for_the_chunk_it_is_rendered_in() -> None:
    assert frame_pairs(FRAME, frames("1-4"), frames("1-4", 3)) == ((1, 1), (2, 1), (3, 1), (4, 4))


def test_chunks_that_overlap_in_part_are_all_waited_for() -> None:
    assert frame_pairs(FRAME, frames("1-6", 3), frames("1-6", 2)) == ((1, 1), (1, 3), (4, 3), (4, 5))


@pytest.mark.parametrize("sides", [(frames("1-9", 100), frames("1-9")), (frames("1-9"), frames("1-9", 9))])
def test_a_layer_in_one_chunk_waits_as_a_whole(sides: tuple[ChunkedRange, ChunkedRange]) -> None:
    assert frame_pairs(FRAME, *sides) is None


@given(st.integers(1, 30), st.integers(1, 6), st.integers(1, 30), st.integers(1, 6))
def test_every_number_is_rendered_before_the_frame_that_needs_it(
    own: int, chunk: int, other: int, on_chunk: int
) -> None:
    waiting, on = frames(f"1-{own}", chunk), frames(f"1-{other}", on_chunk)
    pairs = frame_pairs(FRAME, waiting, on)
    if pairs is None:
        return
    for number in waiting.numbers:
        needed = set(waiting.frames.chunk(number, chunk)) & set(on.frames.numbers)
        rendered = {made for er, o in pairs if er == number for made in on.frames.chunk(o, on_chunk)}
        assert needed <= rendered
    assert len(set(pairs)) == len(pairs)


def test_previous_frame_follows_the_order_of_the_range() -> None:
    sim = frames("1-4")
    assert frame_pairs(PREVIOUS, sim, sim) == ((2, 1), (3, 2), (4, 3))
    assert frame_pairs(PREVIOUS, frames("4-1"), sim) == ((3, 4), (2, 3), (1, 2))
    assert frame_pairs(PREVIOUS, frames("1-6", 2), frames("1-6", 2)) == ((3, 1), (5, 3))
    assert frame_pairs(PREVIOUS, frames("1-3"), frames("10-12")) == ()


def circle_of(edges: list[tuple[str, str, DependType]]) -> tuple[str, ...]:
    """That of layers of three frames each."""
    layers = {name: frames("1-3") for waiting, on, _ in edges for name in (waiting, on)}
    pairs = {kind: frame_pairs(kind, frames("1-3"), frames("1-3")) for kind in (FRAME, PREVIOUS)}
    return waiting_circle(layers, [(waiting, on, pairs.get(kind)) for waiting, on, kind in edges])


@pytest.mark.parametrize(
    ("edges", "circle"),
    [
        ([], ()),
        ([("comp", "render", LAYER), ("sheet", "comp", LAYER), ("sheet", "render", FRAME)], ()),
        ([("a", "b", LAYER), ("b", "a", LAYER)], ("a", "b", "a")),
        ([("a", "b", FRAME), ("b", "c", LAYER), ("c", "a", FRAME)], ("a", "b", "c", "a")),
        ([("a", "a", LAYER)], ("a", "a")),
        ([("a", "a", FRAME)], ("a", "a")),
        ([("a", "a", PREVIOUS)], ()),
        ([("a", "b", PREVIOUS), ("b", "a", FRAME)], ()),
        ([("a", "b", PREVIOUS), ("b", "a", LAYER)], ("a", "b", "a")),
        ([("a", "b", PREVIOUS), ("b", "a", PREVIOUS)], ()),
    ],
)
def test_circles(edges: list[tuple[str, str, DependType]], circle: tuple[str, ...]) -> None:
    assert circle_of(edges) == circle


def test_frames_that_wait_crosswise_are_a_circle() -> None:
    layers = {"a": frames("1-2"), "b": frames("1-2")}
    assert waiting_circle(layers, [("a", "b", [(1, 2)]), ("b", "a", [(2, 1)])]) == ("a", "b", "a")
    assert waiting_circle(layers, [("a", "b", [(1, 2)]), ("b", "a", [(1, 2)])]) == ()


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), max_size=60))
def test_layers_that_only_wait_for_earlier_ones_never_make_a_circle(numbers: list[tuple[int, int]]) -> None:
    edges = [(f"l{max(pair)}", f"l{min(pair)}", LAYER) for pair in numbers if pair[0] != pair[1]]
    assert circle_of(edges) == ()


def test_only_groups_of_frame_depends_are_composite() -> None:
    assert [kind for kind in DependType if kind.composite] == [FRAME, PREVIOUS]
