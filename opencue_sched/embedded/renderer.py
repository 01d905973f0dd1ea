"""A small renderer of our own, for frames that real RQDs can render anywhere: Python's standard library, nothing else.

As a file (with pictures.py beside it) or as a module::

    python renderer.py frame --number 7 --count 48 --output DIR/frame.%04d.png
    python renderer.py sheet --input DIR --output contact-sheet.png

The scene is a signed distance field: four blobs melting into each other inside a turning ring, over a polished floor at
dusk; the camera goes round once in ``--count`` frames, so the animation loops. Frame n is the same picture wherever and
however often it is rendered.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

if __package__:
    from opencue_sched.embedded.pictures import Picture, contact_sheet, numbered, write_png
else:
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    from pictures import Picture, contact_sheet, numbered, write_png  # type: ignore[import-not-found, no-redef]

Colour = tuple[float, float, float]
Vector = tuple[float, float, float]

_FAR = 40.0
_HIT = 0.002
_BOUND_CENTRE_Y, _BOUND_RADIUS = 1.02, 1.66
_SUN: Vector = (0.55, 0.52, -0.653)
_SUN_COLOUR: Colour = (1.55, 1.18, 0.82)


class Scene:
    """Everything that depends on the moment only. ``phase`` goes from 0 to 1 round the loop."""

    def __init__(self, phase: float) -> None:
        turn = 2.0 * math.pi * phase
        self.blobs: list[tuple[float, float, float, float]] = [
            (0.0, 1.0 + 0.06 * math.sin(2 * turn), 0.0, 0.56),
            *(
                (
                    0.86 * math.cos(2 * turn + spread),
                    1.0 + 0.42 * math.sin(turn + 2 * spread),
                    0.86 * math.sin(2 * turn + spread),
                    0.33 + 0.05 * math.sin(turn + spread),
                )
                for spread in (0.0, 2.094, 4.189)
            ),
        ]
        self._ring = _ring(-turn)
        self.distance = self._make_distance()
        angle = turn + 0.6
        self.eye: Vector = (3.5 * math.cos(angle), 1.55 + 0.40 * math.sin(turn), 3.5 * math.sin(angle))

    def _make_distance(self) -> Callable[[float, float, float], float]:
        """The distance to the nearest surface of blobs and ring, with everything constant taken out of the way."""
        (ax, ay, az, ar), (bx, by, bz, br), (cx, cy, cz, cr), (dx, dy, dz, dr) = self.blobs
        ring_distance = self._ring
        sqrt = math.sqrt

        def distance(x: float, y: float, z: float) -> float:
            near = sqrt((x - ax) * (x - ax) + (y - ay) * (y - ay) + (z - az) * (z - az)) - ar
            for px, py, pz, radius in ((bx, by, bz, br), (cx, cy, cz, cr), (dx, dy, dz, dr)):
                other = sqrt((x - px) * (x - px) + (y - py) * (y - py) + (z - pz) * (z - pz)) - radius
                blend = 0.38 - abs(near - other)
                if other < near:
                    near = other
                if blend > 0.0:
                    near -= blend * blend * 0.6579
            ring = ring_distance(x, y, z)
            return ring if ring < near else near

        return distance

    def normal(self, x: float, y: float, z: float) -> Vector:
        """Direction in which the distance grows (tetrahedron differences)."""
        d, e = self.distance, 0.0015
        a, b = d(x + e, y - e, z - e), d(x - e, y - e, z + e)
        c, f = d(x - e, y + e, z - e), d(x + e, y + e, z + e)
        return _unit(a - b - c + f, -a - b + c + f, -a + b - c + f)

    def albedo(self, x: float, y: float, z: float) -> tuple[Colour, float]:
        """Colour and shininess of the surface at a point: the blobs' colours weighed by nearness, gold on the ring."""
        if self._ring(x, y, z) < 0.01:
            return (1.0, 0.70, 0.30), 1.0
        weights = []
        for px, py, pz, radius in self.blobs:
            gap = math.sqrt((x - px) ** 2 + (y - py) ** 2 + (z - pz) ** 2) - radius
            weights.append(math.exp(-5.5 * max(gap, -0.2)))
        total = sum(weights)
        mixed = [0.0, 0.0, 0.0]
        for weight, colour in zip(weights, _BLOB_COLOURS, strict=True):
            for channel in range(3):
                mixed[channel] += weight / total * colour[channel]
        return (mixed[0], mixed[1], mixed[2]), 0.55

    def march(self, x: float, y: float, z: float, dx: float, dy: float, dz: float) -> float:
        """Distance along a ray to blobs or ring, or _FAR. Rays that miss the ball around them cost nothing."""
        along = -(x * dx + (y - _BOUND_CENTRE_Y) * dy + z * dz)
        beside = x * x + (y - _BOUND_CENTRE_Y) ** 2 + z * z - along * along
        room = _BOUND_RADIUS * _BOUND_RADIUS - beside
        if room <= 0.0:
            return _FAR
        half = math.sqrt(room)
        travelled, end = max(0.0, along - half), along + half
        distance = self.distance
        for _ in range(60):
            if travelled >= end:
                return _FAR
            gap = distance(x + dx * travelled, y + dy * travelled, z + dz * travelled)
            if gap < _HIT:
                return travelled
            travelled += gap * 0.95
        return travelled if travelled < end else _FAR

    def sunlight(self, x: float, y: float, z: float) -> float:
        """1 in the sun, 0 in the shade, in between in the soft edge of a shadow."""
        dx, dy, dz = _SUN
        along = -(x * dx + (y - _BOUND_CENTRE_Y) * dy + z * dz)
        beside = x * x + (y - _BOUND_CENTRE_Y) ** 2 + z * z - along * along
        room = (_BOUND_RADIUS + 0.25) ** 2 - beside
        if room <= 0.0 or along + math.sqrt(room) <= 0.0:
            return 1.0
        travelled, end, light = max(0.03, along - math.sqrt(room)), along + math.sqrt(room), 1.0
        distance = self.distance
        for _ in range(24):
            gap = distance(x + dx * travelled, y + dy * travelled, z + dz * travelled)
            light = min(light, 9.0 * gap / travelled)
            if light < 0.01:
                return 0.0
            travelled += min(max(gap, 0.05), 0.35)
            if travelled >= end:
                break
        return light * light * (3.0 - 2.0 * light)

    def openness(self, x: float, y: float, z: float, nx: float, ny: float, nz: float) -> float:
        """Ambient occlusion: 1 in the open, towards 0 in creases and near the floor."""
        shut = 0.0
        for reach, weight in ((0.06, 1.6), (0.18, 1.0), (0.40, 0.55)):
            py = y + ny * reach
            gap = min(self.distance(x + nx * reach, py, z + nz * reach), py)
            shut += (reach - gap) * weight
        return max(0.0, 1.0 - 0.9 * shut)


def _ring(turn: float) -> Callable[[float, float, float], float]:
    """The distance to a ring that turns about the upright and sways."""
    tilt = 0.42 + 0.22 * math.sin(turn)
    cos_tilt, sin_tilt = math.cos(tilt), math.sin(tilt)
    cos_turn, sin_turn = math.cos(turn), math.sin(turn)
    sqrt = math.sqrt

    def distance(x: float, y: float, z: float) -> float:
        u = x * cos_turn + z * sin_turn
        v = z * cos_turn - x * sin_turn
        w = y - 1.0
        height = w * cos_tilt - u * sin_tilt
        along = sqrt((u * cos_tilt + w * sin_tilt) ** 2 + v * v) - 1.5
        return sqrt(along * along + height * height) - 0.058

    return distance


_BLOB_COLOURS: tuple[Colour, ...] = ((0.92, 0.20, 0.12), (0.03, 0.48, 0.56), (0.34, 0.10, 0.62), (0.98, 0.52, 0.14))


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


def _lit(scene: Scene, point: Vector, ray: Vector) -> Colour:
    """Colour of blobs or ring where a ray meets them."""
    x, y, z = point
    nx, ny, nz = scene.normal(x, y, z)
    colour, shine = scene.albedo(x, y, z)
    open_sky = scene.openness(x, y, z, nx, ny, nz)
    facing = nx * _SUN[0] + ny * _SUN[1] + nz * _SUN[2]
    sun = scene.sunlight(x + nx * 0.02, y + ny * 0.02, z + nz * 0.02) if facing > 0.0 else 0.0
    direct = max(0.0, facing) * sun
    sky = 0.5 + 0.5 * ny
    against = -(ray[0] * nx + ray[1] * ny + ray[2] * nz)
    mirrored = (ray[0] + 2 * against * nx, ray[1] + 2 * against * ny, ray[2] + 2 * against * nz)
    seen = _sky(*mirrored) if mirrored[1] > 0.0 else (0.10, 0.08, 0.10)
    edge = (0.05 + 0.5 * max(0.0, 1.0 - against) ** 4) * (0.4 + shine) * open_sky
    sparkle = max(0.0, mirrored[0] * _SUN[0] + mirrored[1] * _SUN[1] + mirrored[2] * _SUN[2]) ** 48 * sun * shine * 1.6
    ambient = (0.20 * sky + 0.09, 0.20 * sky + 0.06, 0.34 * sky + 0.05)
    return _colour(
        colour[i] * (ambient[i] * open_sky + _SUN_COLOUR[i] * direct) + seen[i] * edge + _SUN_COLOUR[i] * sparkle
        for i in range(3)
    )


def _floor(scene: Scene, point: Vector, ray: Vector) -> Colour:
    """Dark polished tiles: sun and shade, contact shadow, and the blobs mirrored in them."""
    x, _, z = point
    radius = math.hypot(x, z)
    ring = abs(math.fmod(radius, 0.9) / 0.9 - 0.5)
    spoke = abs(math.fmod((math.atan2(z, x) / (2 * math.pi) + 1.0) * 24.0, 1.0) - 0.5) if radius > 0.9 else 0.0
    fade = math.exp(-0.05 * radius * radius)
    line = 1.0 + 0.55 * fade * max(_step(0.455, 0.49, ring), _step(0.46, 0.49, spoke))
    sun = scene.sunlight(x, 0.02, z)
    shut = 1.0
    if radius < 2.4:
        shut = min(1.0, 0.35 + 0.65 * min(1.0, scene.distance(x, 0.25, z) / 0.9))
    base = (0.060 * line, 0.058 * line, 0.085 * line)
    light = tuple((0.30 + 0.25 * i / 2) * shut + _SUN_COLOUR[i] * 0.75 * sun for i in range(3))
    mirrored = (ray[0], -ray[1], ray[2])
    travelled = scene.march(x, 0.01, z, *mirrored)
    if travelled < _FAR:
        there = (x + mirrored[0] * travelled, 0.01 + mirrored[1] * travelled, z + mirrored[2] * travelled)
        seen = _lit(scene, there, mirrored)
    else:
        seen = _sky(*mirrored)
    shine = 0.16 + 0.66 * (1.0 - max(0.0, -ray[1])) ** 3.5
    return _colour(base[i] * light[i] * 2.0 * (1.0 - shine) + seen[i] * shine for i in range(3))


def _step(low: float, high: float, value: float) -> float:
    part = min(1.0, max(0.0, (value - low) / (high - low)))
    return part * part * (3.0 - 2.0 * part)


def _trace(scene: Scene, ray: Vector) -> Colour:
    """What the camera sees along a ray, before exposure."""
    x, y, z = scene.eye
    travelled = scene.march(x, y, z, *ray)
    if travelled < _FAR:
        return _lit(scene, (x + ray[0] * travelled, y + ray[1] * travelled, z + ray[2] * travelled), ray)
    if ray[1] >= -0.004:
        return _sky(*ray)
    travelled = y / -ray[1]
    colour = _floor(scene, (x + ray[0] * travelled, 0.0, z + ray[2] * travelled), ray)
    fog = 1.0 - math.exp(-0.0016 * travelled * travelled)
    haze = _sky(ray[0], 0.0, ray[2])
    return _colour(colour[i] + (haze[i] - colour[i]) * fog for i in range(3))


class _Camera:
    """Turns a place on the picture into a ray."""

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
        forward, side, up = self._axes
        u = (2.0 * column - self._width) / self._height * 0.52
        v = (self._height - 2.0 * row) / self._height * 0.52
        return _unit(*(forward[i] + side[i] * u + up[i] * v for i in range(3)))


def _exposed(colour: Colour, column: float, row: float) -> Colour:
    """Filmic tone curve, gamma and a slight darkening towards the corners; 0 to 1. Places from -1 to 1."""
    corner = 1.0 - 0.16 * (column * column + row * row)
    out = []
    for light in colour:
        lit = max(0.0, light) * corner * 1.05
        out.append(min(1.0, (lit * (2.51 * lit + 0.03)) / (lit * (2.43 * lit + 0.59) + 0.14)) ** (1 / 2.2))
    return out[0], out[1], out[2]


def render(phase: float, width: int, height: int, samples: int = 4) -> Picture:
    """The picture at ``phase`` (0 to 1). Pixels that differ from a neighbour are rendered with ``samples`` rays."""
    scene = Scene(phase)
    camera = _Camera(scene, width, height)

    def shade(column: float, row: float) -> Colour:
        place = 2.0 * column / width - 1.0, 2.0 * row / height - 1.0
        return _exposed(_trace(scene, camera.ray(column, row)), *place)

    image = [[shade(column + 0.5, row + 0.5) for column in range(width)] for row in range(height)]
    if samples > 1:
        for row, column in _edges(image):
            several = [image[row][column], *(shade(column + u, row + v) for u, v in _OFFSETS[: samples - 1])]
            image[row][column] = _colour(sum(c[i] for c in several) / len(several) for i in range(3))
    pixels = bytes(int(light * 255.0 + 0.5) for line in image for colour in line for light in colour)
    return Picture(width, height, pixels)


_OFFSETS = ((0.2, 0.3), (0.75, 0.15), (0.8, 0.8), (0.25, 0.75), (0.5, 0.1), (0.1, 0.55), (0.9, 0.45))


def _edges(image: Sequence[Sequence[Colour]]) -> list[tuple[int, int]]:
    """Pixels that differ visibly from the pixel to the right or below, and those pixels."""
    found: set[tuple[int, int]] = set()
    for row, line in enumerate(image):
        for column, colour in enumerate(line):
            for other_row, other_column in ((row, column + 1), (row + 1, column)):
                if other_row < len(image) and other_column < len(line):
                    other = image[other_row][other_column]
                    if sum(abs(a - b) for a, b in zip(colour, other, strict=True)) > 0.16:
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
    if min(given.width, given.height) < 8 or given.count < 1 or not all(1 <= n <= given.count for n in given.number):
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
