"""Frame ranges in every form, chunks, specs and frame names."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from opencue_sched.domain.depends import ChunkedRange
from opencue_sched.domain.frame_range import MAX_NUMBERS, FrameRange, check_frame_range, frame_spec
from opencue_sched.domain.names import frame_name, os_names
from opencue_sched.errors import InvalidInput


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("7", [7]),
        ("-7", [-7]),
        ("0", [0]),
        ("1-5", [1, 2, 3, 4, 5]),
        ("6-2", [6, 5, 4, 3, 2]),
        ("-5--3", [-5, -4, -3]),
        ("-1-2", [-1, 0, 1, 2]),
        ("-2--4", [-2, -3, -4]),
        ("3-3", [3]),
        ("1-8x2", [1, 3, 5, 7]),
        ("1-8x20", [1]),
        ("8-1x-2", [8, 6, 4, 2]),
        ("-6-0x3", [-6, -3, 0]),
        ("1-10y3", [2, 3, 5, 6, 8, 9]),
        ("1-8y2", [2, 4, 6, 8]),
        ("8-1y-2", [7, 5, 3, 1]),
        ("1-10:5", [1, 6, 3, 5, 7, 9, 2, 4, 8, 10]),
        ("10-1:-5", [10, 5, 8, 6, 4, 2, 9, 7, 3, 1]),
        ("1-3:1", [1, 2, 3]),
        ("1-3,10,20-24x2", [1, 2, 3, 10, 20, 22, 24]),
        (" 1-3 , 5", [1, 2, 3, 5]),
        ("5,1-6,3", [5, 1, 2, 3, 4, 6]),
    ],
)
def test_every_form_of_a_range(text: str, numbers: list[int]) -> None:
    assert list(FrameRange.parse(text).numbers) == numbers
    check_frame_range(text)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "''"),
        ("a", "'a'"),
        ("1-5,a-b,7", "'a-b'"),
        ("1-5,,7", "''"),
        ("1-10-20", "'1-10-20'"),
        ("1x10-20", "'1x10-20'"),
        ("1-5xc", "'1-5xc'"),
        ("1-5:c", "'1-5:c'"),
        ("1-5x", "'1-5x'"),
        ("1 - 5", "'1 - 5'"),
        ("--1", "'--1'"),
        ("1.5", "'1.5'"),
        ("١-٣", "'١-٣'"),
        ("3,1-8x0", "'1-8x0'"),
        ("10-1x2", "'10-1x2'"),
        ("1-8x-2", "'1-8x-2'"),
        ("9999999999", "9999999999"),
        ("1-" + "9" * 5000, "'1-999"),
    ],
)
def test_a_range_that_does_not_parse_is_refused_by_its_piece(text: str, named: str) -> None:
    with pytest.raises(InvalidInput) as error:
        FrameRange.parse(text)
    assert named in str(error.value)
    assert len(str(error.value)) < 250
    with pytest.raises(InvalidInput) as checked:
        check_frame_range(text)
    assert str(checked.value) == str(error.value)


def test_a_range_without_a_single_frame_is_refused() -> None:
    with pytest.raises(InvalidInput, match="1-10y1"):
        FrameRange.parse("1-10y1")


@pytest.mark.parametrize(
    "text", ["1-2000000000", "1-2000000000x2", "1-2000000000y3", "1-2000000000:4", "-2147483648-2147483647"]
)
def test_a_huge_range_is_refused_before_it_is_expanded(text: str) -> None:
    with pytest.raises(InvalidInput, match=str(MAX_NUMBERS)):
        FrameRange.parse(text)


def test_the_limit_counts_all_pieces() -> None:
    half = MAX_NUMBERS // 2
    assert len(FrameRange.parse(f"1-{half},{half + 1}-{MAX_NUMBERS}").numbers) == MAX_NUMBERS
    with pytest.raises(InvalidInput, match=f"'1-{half},0-{half}' .*{MAX_NUMBERS}"):
        FrameRange.parse(f"1-{half},0-{half}")


def test_interleaving_a_range_does_not_count_its_numbers_twice() -> None:
    assert len(FrameRange.parse(f"1-{MAX_NUMBERS}:2").numbers) == MAX_NUMBERS


def test_the_text_is_kept_without_its_spaces() -> None:
    assert FrameRange.parse(" 1-3 , 5 ").text == "1-3,5"


def test_a_chunk_is_the_frame_and_those_after_it_in_the_range() -> None:
    frames = FrameRange.parse("1-10")
    assert ChunkedRange(frames, 4).numbers == (1, 5, 9)
    assert frames.chunk(5, 4) == [5, 6, 7, 8]
    assert frames.chunk(9, 4) == [9, 10]
    assert frames.chunk(3, 1) == [3]
    assert ChunkedRange(frames, 1_000_000).numbers == (1,)


def test_chunks_of_a_range_with_repeats_render_every_number() -> None:
    # OpenCue cuts the second chunk from 1,2,3,4,5,3,4,5,6,7,8 and so never renders 6 to 8.
    frames = FrameRange.parse("1-5,3-8")
    assert [frames.chunk(number, 4) for number in ChunkedRange(frames, 4).numbers] == [[1, 2, 3, 4], [5, 6, 7, 8]]


def test_a_frame_that_is_not_in_the_range_has_no_chunk() -> None:
    with pytest.raises(InvalidInput, match=r"11\b.*\b1-10"):
        FrameRange.parse("1-10").chunk(11, 1)


@pytest.mark.parametrize(
    ("numbers", "spec"),
    [
        ([], ""),
        ([7], "7"),
        ([1, 2], "1-2"),
        ([1, 3], "1,3"),
        ([1, 3, 5], "1-5x2"),
        ([1, 2, 3, 10, 12, 14, 30], "1-3,10-14x2,30"),
        ([1, 3, 4, 5], "1,3-5"),
        ([5, 4, 3], "5-3x-1"),
        ([-5, -4, -3, 0], "-5--3,0"),
        ([8, 6, 4], "8-4x-2"),
    ],
)
def test_a_spec_writes_runs_as_ranges(numbers: list[int], spec: str) -> None:
    assert frame_spec(numbers) == spec


def test_a_spec_of_repeated_numbers_writes_each_of_them() -> None:
    assert frame_spec([4, 4, 4]) == "4,4,4"


numbers_of_a_frame = st.integers(-2000, 2000)


@given(st.lists(numbers_of_a_frame, unique=True, min_size=1, max_size=60))
def test_a_spec_parses_to_the_numbers_it_was_made_of(numbers: list[int]) -> None:
    assert list(FrameRange.parse(frame_spec(numbers)).numbers) == numbers


pieces = st.builds(
    lambda start, end, kind, step: (
        f"{start}-{end}" + ("" if kind == "" else f"{kind}{step if end >= start else -step}")
        if start != end
        else str(start)
    ),
    numbers_of_a_frame,
    numbers_of_a_frame,
    st.sampled_from(["", "x", "y", ":"]),
    st.integers(2, 50),
)


@given(st.lists(pieces, min_size=1, max_size=4), st.integers(1, 40))
def test_chunks_partition_the_range(parts: list[str], size: int) -> None:
    frames = FrameRange.parse(",".join(parts))
    assert len(set(frames.numbers)) == len(frames.numbers)
    chunks = [frames.chunk(number, size) for number in ChunkedRange(frames, size).numbers]
    assert [number for chunk in chunks for number in chunk] == list(frames.numbers)


@given(numbers_of_a_frame, numbers_of_a_frame, st.integers(1, 50))
def test_a_step_and_its_inverse_and_an_interleave_cover_the_same_numbers(start: int, end: int, step: int) -> None:
    if start == end:
        return
    signed = step if end > start else -step
    everything = set(FrameRange.parse(f"{start}-{end}").numbers)
    stepped = set(FrameRange.parse(f"{start}-{end}x{signed}").numbers)
    assert set(FrameRange.parse(f"{start}-{end}:{signed}").numbers) == everything
    if stepped != everything:
        assert set(FrameRange.parse(f"{start}-{end}y{signed}").numbers) == everything - stepped


def test_frame_names_as_opencue_writes_them() -> None:
    assert frame_name(12, "render") == "0012-render"
    assert frame_name(123456, "render") == "123456-render"
    assert frame_name(-1, "render") == "-001-render"


def test_os_lists() -> None:
    assert os_names("linux, rocky9,,") == ("linux", "rocky9")
    assert os_names(None) == os_names("") == ()
