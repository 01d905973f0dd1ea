"""A small renderer of our own, for frames that real RQDs can render anywhere: Python's standard library, nothing else.

As a file (with pictures.py beside it) or as a module::

    python renderer.py frame --number 7 --count 48 --output DIR/frame.%04d.png
    python renderer.py sheet --input DIR --output contact-sheet.png

A ray tracer: polished balls circle over a tiled floor at dusk, and the camera goes round once in ``--count`` frames, so
the animation loops. Frame n is the same picture wherever and however often it is rendered.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

if __package__:
    from opencue_sched.embedded.demo.pictures import Picture, contact_sheet, numbered, write_png
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from pictures import Picture, contact_sheet, numbered, write_png  # type: ignore[import-not-found, no-redef]

Colour = tuple[float, float, float]
Vector = tuple[float, float, float]

# Colours are light, red, green and blue, before exposure: 1 is bright, and more is allowed. Lengths are those of the
# scene, in which the large ball is 0.72 in radius.

_SUN: Vector = (0.55, 0.52, -0.653)
"""The direction towards the sun; its length is 1."""
_SUN_COLOUR: Colour = (1.55, 1.18, 0.82)
_BALL_COLOURS: tuple[Colour, ...] = ((1.0, 0.70, 0.30), (0.92, 0.20, 0.12), (0.03, 0.48, 0.56), (0.34, 0.10, 0.62))
_MIRRORINGS = 2
"""How often a ray is followed from one polished surface to the next."""
_OFFSETS = ((0.2, 0.3), (0.75, 0.15), (0.8, 0.8), (0.25, 0.75), (0.5, 0.1), (0.1, 0.55), (0.9, 0.45))
"""Where the second and further rays go through a pixel: across and down, in parts of a pixel."""


class Ball(NamedTuple):
    centre: Vector
    radius: float
    colour: Colour


class Scene:
    """The balls and the eye at one moment. ``phase`` goes from 0 to 1 in one round of the loop."""

    def __init__(self, phase: float) -> None:
        turn = 2.0 * math.pi * phase
        self.balls = [Ball((0.0, 0.95 + 0.10 * math.sin(2 * turn), 0.0), 0.72, _BALL_COLOURS[0])]
        for place, colour in enumerate(_BALL_COLOURS[1:]):
            angle = 2 * turn + place * 2.0 * math.pi / 3
            height = 0.85 + 0.45 * math.sin(turn + 2 * angle)
            self.balls.append(Ball((1.35 * math.cos(angle), height, 1.35 * math.sin(angle)), 0.36, colour))
        angle = turn + 0.6
        self.eye: Vector = (3.9 * math.cos(angle), 1.55 + 0.40 * math.sin(turn), 3.9 * math.sin(angle))

    def trace(self, start: Vector, ray: Vector, mirrorings: int = _MIRRORINGS) -> Colour:
        """The light that comes to ``start`` against the direction ``ray``, before exposure."""
        distance, ball = self._nearest(start, ray)
        if ball is not None:
            point = _along(start, ray, distance)
            normal = _unit(*((point[axis] - ball.centre[axis]) for axis in range(3)))
            return self._surface(point, normal, ray, ball.colour, 0.25, mirrorings)
        if ray[1] >= -0.004:
            return _sky(*ray)
        distance = -start[1] / ray[1]
        point = _along(start, ray, distance)
        tile = 0.16 if (math.floor(point[0] * 1.6) + math.floor(point[2] * 1.6)) % 2 else 0.07
        seen = self._surface(point, (0.0, 1.0, 0.0), ray, (tile, tile, 1.3 * tile), 0.18, mirrorings)
        fog = 1.0 - math.exp(-0.0016 * distance * distance)
        return _mixed(seen, _sky(ray[0], 0.0, ray[2]), fog)

    def _surface(
        self, point: Vector, normal: Vector, ray: Vector, colour: Colour, polish: float, mirrorings: int
    ) -> Colour:
        """The light from a surface: of the sun and the sky, and mirrored; the flatter the ray, the more is mirrored.

        ``polish`` is the part that is mirrored where the ray is perpendicular to the surface.
        """
        above = _along(point, normal, 0.001)
        facing = max(0.0, _dot(normal, _SUN))
        if facing and self._nearest(above, _SUN)[1] is not None:
            facing = 0.0
        sky = 0.20 + 0.10 * normal[1]
        lit = _colour(colour[channel] * (sky + _SUN_COLOUR[channel] * facing) for channel in range(3))
        if not mirrorings:
            return lit
        against = -_dot(ray, normal)
        mirrored = self.trace(above, _along(ray, normal, 2.0 * against), mirrorings - 1)
        return _mixed(lit, mirrored, polish + (1.0 - polish) * (1.0 - max(0.0, against)) ** 4)

    def _nearest(self, start: Vector, ray: Vector) -> tuple[float, Ball | None]:
        """How far away a ray meets its first ball, and the ball; infinity and None when it meets none."""
        nearest, found = math.inf, None
        for ball in self.balls:
            (x, y, z), radius = ball.centre, ball.radius
            dx, dy, dz = x - start[0], y - start[1], z - start[2]
            middle = dx * ray[0] + dy * ray[1] + dz * ray[2]
            half_squared = radius * radius - (dx * dx + dy * dy + dz * dz - middle * middle)
            if half_squared > 0.0:
                distance = middle - math.sqrt(half_squared)
                if 0.0 < distance < nearest:
                    nearest, found = distance, ball
        return nearest, found


def _along(start: Vector, direction: Vector, distance: float) -> Vector:
    """The point to which ``distance`` lengths of ``direction`` lead from ``start``."""
    return (
        start[0] + direction[0] * distance,
        start[1] + direction[1] * distance,
        start[2] + direction[2] * distance,
    )


def _dot(one: Vector, other: Vector) -> float:
    return one[0] * other[0] + one[1] * other[1] + one[2] * other[2]


def _unit(x: float, y: float, z: float) -> Vector:
    length = math.sqrt(x * x + y * y + z * z) or 1.0
    return x / length, y / length, z / length


def _colour(channels: Iterable[float]) -> Colour:
    red, green, blue = channels
    return red, green, blue


def _sky(dx: float, dy: float, dz: float) -> Colour:
    """Dusk: peach at the horizon, violet above it, deep blue overhead, a glow around the sun."""
    up = max(0.0, dy)
    low, high = math.exp(-7.5 * up), 1.0 - math.exp(-1.9 * up)
    glow = max(0.0, dx * _SUN[0] + dy * _SUN[1] + dz * _SUN[2])
    warm = 0.20 * glow**6 + 0.9 * glow**90
    return (
        0.028 + 0.46 * low * low + 0.10 * low + warm,
        0.042 + 0.17 * low * low + 0.075 * low + 0.62 * warm,
        0.115 + 0.05 * low * low + 0.13 * low - 0.03 * high + 0.26 * warm,
    )


def _mixed(base: Colour, added: Colour, weight: float) -> Colour:
    """``weight`` (0 to 1) of the added colour, and of the base what is left to 1."""
    return _colour(base[channel] + (added[channel] - base[channel]) * weight for channel in range(3))


class _Camera:
    """The eye's view of the middle of the scene: it turns a place on the picture, in pixels, into a ray."""

    def __init__(self, scene: Scene, width: int, height: int) -> None:
        forward = _unit(-scene.eye[0], 0.92 - scene.eye[1], -scene.eye[2])
        side = _unit(-forward[2], 0.0, forward[0])
        up = (
            side[1] * forward[2] - side[2] * forward[1],
            side[2] * forward[0] - side[0] * forward[2],
            side[0] * forward[1] - side[1] * forward[0],
        )
        self._axes = (forward, side, up)
        self._width, self._height = width, height

    def ray(self, column: float, row: float) -> Vector:
        """The direction of the ray through a place in pixels from the left and the top; its length is 1."""
        forward, side, up = self._axes
        u = (2.0 * column - self._width) / self._height * 0.52
        v = (self._height - 2.0 * row) / self._height * 0.52
        return _unit(*(forward[axis] + side[axis] * u + up[axis] * v for axis in range(3)))


def _exposed(colour: Colour, across: float, down: float) -> Colour:
    """Turn light into a colour of a picture, each channel from 0 to 1: filmic tone curve, then gamma.

    ``across`` and ``down`` are the place on the picture, each from -1 to 1: the corners are slightly darker.
    """
    corner = 1.0 - 0.16 * (across * across + down * down)
    exposed = []
    for light in colour:
        lit = max(0.0, light) * corner * 1.05
        exposed.append(min(1.0, (lit * (2.51 * lit + 0.03)) / (lit * (2.43 * lit + 0.59) + 0.14)) ** (1 / 2.2))
    return _colour(exposed)


def render(phase: float, width: int, height: int, samples: int = 4) -> Picture:
    """The picture at ``phase`` (0 to 1), ``width`` by ``height`` pixels.

    Pixels that differ from a neighbour are rendered with ``samples`` rays, all others with one.
    """
    scene = Scene(phase)
    camera = _Camera(scene, width, height)

    def shade(column: float, row: float) -> Colour:
        place = 2.0 * column / width - 1.0, 2.0 * row / height - 1.0
        return _exposed(scene.trace(scene.eye, camera.ray(column, row)), *place)

    image = [[shade(column + 0.5, row + 0.5) for column in range(width)] for row in range(height)]
    if samples > 1:
        for row, column in _edges(image):
            shades = [image[row][column], *(shade(column + u, row + v) for u, v in _OFFSETS[: samples - 1])]
            image[row][column] = _colour(
                sum(colour[channel] for colour in shades) / len(shades) for channel in range(3)
            )
    pixels = bytes(int(light * 255.0 + 0.5) for line in image for colour in line for light in colour)
    return Picture(width, height, pixels)


def _edges(image: Sequence[Sequence[Colour]]) -> list[tuple[int, int]]:
    """Row and column of each pixel that differs visibly from the pixel to its right or below it, and of that pixel."""
    found: set[tuple[int, int]] = set()
    for row, line in enumerate(image):
        for column, colour in enumerate(line):
            for other_row, other_column in ((row, column + 1), (row + 1, column)):
                if other_row < len(image) and other_column < len(line):
                    other = image[other_row][other_column]
                    if sum(abs(light - other_light) for light, other_light in zip(colour, other, strict=True)) > 0.16:
                        found.update(((row, column), (other_row, other_column)))
    return sorted(found)


def main(arguments: Sequence[str] | None = None) -> int:
    """``frame`` renders one frame, ``sheet`` puts all of them on one picture. Exit code 2 for bad arguments."""
    parser = argparse.ArgumentParser(prog="renderer", description="Renders a looping animation, frame by frame")
    commands = parser.add_subparsers(dest="command", required=True)
    frame = commands.add_parser("frame", help="render one frame, or several")
    frame.add_argument("--number", type=int, required=True, nargs="+", help="frame number, from 1 to --count")
    frame.add_argument("--count", type=int, default=48, help="frames of the whole loop")
    frame.add_argument("--width", type=int, default=192)
    frame.add_argument("--height", type=int, default=108)
    frame.add_argument("--samples", type=int, default=4, choices=range(1, 9), help="rays per pixel along edges")
    frame.add_argument("--output", required=True, help="file name; %%04d stands for the number")
    sheet = commands.add_parser("sheet", help="assemble a contact sheet")
    sheet.add_argument("--input", type=Path, required=True, help="directory with frame.NNNN.png")
    sheet.add_argument("--output", type=Path, required=True)
    sheet.add_argument("--columns", type=int, default=8)
    sheet.add_argument("--count", type=int, default=None, help="fail unless there are so many frames")
    sheet.add_argument("--title", default="OPENCUE-SCHED")
    given = parser.parse_args(arguments)
    began = time.monotonic()
    if given.command == "sheet":
        pictures = numbered(given.input)
        if not pictures or given.count not in (None, len(pictures)):
            parser.error(f"{given.input} holds {len(pictures)} frames, expected {given.count or 'some'}")
        write_png(given.output, contact_sheet(pictures, columns=given.columns, title=given.title))
        _say(f"{given.output}: {len(pictures)} frames in {time.monotonic() - began:.2f} s")
        return 0
    if (
        min(given.width, given.height) < 8
        or given.count < 1
        or not all(1 <= number <= given.count for number in given.number)
    ):
        parser.error("--width and --height must be 8 or more, --number from 1 to --count")
    for number in given.number:
        began = time.monotonic()
        path = Path(given.output % number if "%" in given.output else given.output)
        write_png(path, render((number - 1) / given.count, given.width, given.height, given.samples))
        _say(f"{path}: frame {number} of {given.count} in {time.monotonic() - began:.2f} s")
    return 0


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
