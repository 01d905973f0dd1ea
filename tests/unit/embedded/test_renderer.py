"""The demo's renderer and its contact sheet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from opencue_sched.embedded.demo import renderer
from opencue_sched.embedded.demo.pictures import Picture, contact_sheet, numbered, read_png, write_png
from tests.kit.wording import lacks


def test_a_frame_is_the_same_whenever_it_is_rendered_and_others_differ() -> None:
    first, again, other = (renderer.render(phase, 32, 18) for phase in (0.25, 0.25, 0.5))
    assert first == again
    assert first.pixels != other.pixels
    assert len(set(first.pixels)) > 100


def test_edges_get_more_rays_and_the_rest_stays() -> None:
    plain, smooth = renderer.render(0.1, 48, 27, samples=1), renderer.render(0.1, 48, 27, samples=4)
    changed = sum(a != b for a, b in zip(plain.pixels, smooth.pixels, strict=True)) / len(plain.pixels)
    assert 0.01 < changed < 0.6


def test_a_png_comes_back_as_it_was(tmp_path: Path) -> None:
    picture = Picture(5, 3, bytes(range(45)))
    write_png(tmp_path / "deep" / "a.png", picture)
    assert read_png(tmp_path / "deep" / "a.png") == picture
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["a.png"]


def test_what_is_no_picture_of_ours_is_refused(tmp_path: Path) -> None:
    # given a good file, cut anywhere or with one byte changed in its pixels
    path = tmp_path / "a.png"
    write_png(path, Picture(40, 30, bytes(range(200)) * 18))
    good = path.read_bytes()
    for damaged in (b"", b"GIF89a", good[:20], good[:60], good[:60] + good[-12:], good[:70] + b"\xff" + good[71:]):
        path.write_bytes(damaged)
        # then reading it says so
        with pytest.raises(ValueError, match=r"a\.png"):
            read_png(path)


def test_the_file_renders_on_its_own_with_any_python(tmp_path: Path) -> None:
    # given the file of the renderer, started by a Python that knows nothing of this package
    script = [sys.executable, "-I", "-S", renderer.__file__]
    size = ["--width", "16", "--height", "9", "--samples", "1"]

    # when it renders a loop of three and assembles them
    made = subprocess.run(
        [*script, "frame", "--number", "1", "2", "3", "--count", "3", *size, "--output", f"{tmp_path}/frame.%04d.png"],
        capture_output=True,
        text=True,
        check=True,
    )
    subprocess.run(
        [*script, "sheet", "--input", tmp_path, "--output", tmp_path / "out" / "sheet.png", "--columns", "2"],
        check=True,
        capture_output=True,
    )

    # then the sheet holds all of them in a grid of two columns and two rows
    pictures = numbered(tmp_path)
    assert list(pictures) == [1, 2, 3]
    assert made.stdout.count("frame ") == 3
    sheet = read_png(tmp_path / "out" / "sheet.png")
    assert sheet == contact_sheet(pictures, columns=2, title="OPENCUE-SCHED")
    assert pictures[3].pixels[:48] in sheet.pixels


def test_a_sheet_needs_pictures_of_one_size() -> None:
    with pytest.raises(ValueError, match=r"\(1, 1\).*\(2, 1\)"):
        contact_sheet({1: Picture(1, 1, bytes(3)), 2: Picture(2, 1, bytes(6))}, columns=2, title="")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["frame", "--number", "49", "--count", "48", "--output", "x.png"], ["--number", "1", "--count"]),
        (["frame", "--number", "0", "--output", "x.png"], ["--number", "1", "--count"]),
        (["frame", "--number", "1", "--width", "1", "--output", "x.png"], ["--width", "--height", "8"]),
        (["sheet", "--input", "/nonexistent", "--output", "x.png"], ["0 frames"]),
    ],
)
def test_bad_arguments_are_refused(arguments: list[str], said: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as refused:
        renderer.main(arguments)
    assert refused.value.code == 2
    assert not lacks(capsys.readouterr().err, *said)


def test_a_sheet_with_frames_missing_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_png(tmp_path / "frame.0001.png", Picture(8, 8, bytes(192)))
    with pytest.raises(SystemExit):
        renderer.main(["sheet", "--input", str(tmp_path), "--output", str(tmp_path / "s.png"), "--count", "48"])
    assert not lacks(capsys.readouterr().err, "1 frames", " 48")
