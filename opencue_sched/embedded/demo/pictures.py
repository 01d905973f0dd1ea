"""Reads and writes PNG files of eight bits a channel, and puts many small pictures on one sheet. Uses the standard
library only."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_NUMBERED = re.compile(r"\.(\d+)\.png$")
_MARGIN, _GAP, _LABEL_HEIGHT, _TITLE_HEIGHT = 16, 10, 15, 34
"""Measures of a sheet, in pixels."""
_BACKGROUND, _LABEL, _TITLE = b"\x14\x13\x1a", b"\x8f\x8a\xa0", b"\xf2\xc2\x84"
"""Colours of a sheet: red, green, blue."""

# Glyphs of 3 x 5 dots: one octal digit per row, from the top.
_GLYPHS = """
75557 26227 71747 71717 55711 74717 74757 71122 75757 75717 00700 00002 11244 02020 00000
25755 65656 34443 65556 74647 74644 34553 55755 72227 11152 55655 44447 57755 65555 25552
65644 25573 65655 34216 72222 55557 55552 55775 55255 55222 71247
"""
_FONT = dict(zip("0123456789-./: ABCDEFGHIJKLMNOPQRSTUVWXYZ", _GLYPHS.split(), strict=True))


@dataclass(frozen=True)
class Picture:
    """Eight-bit RGB, rows from the top."""

    width: int
    height: int
    pixels: bytes

    @property
    def size(self) -> tuple[int, int]:
        """Width and height, in pixels."""
        return self.width, self.height


def write_png(path: Path, picture: Picture) -> None:
    """Write a PNG; a reader never sees half of it."""
    stride = picture.width * 3
    rows = b"".join(b"\0" + picture.pixels[start : start + stride] for start in range(0, len(picture.pixels), stride))
    header = struct.pack(">IIBBBBB", picture.width, picture.height, 8, 2, 0, 0, 0)
    parts = (b"IHDR", header), (b"IDAT", zlib.compress(rows, 6)), (b"IEND", b"")
    chunks = b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data)) for kind, data in parts
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(_PNG_SIGNATURE + chunks)
    unfinished.replace(path)


def read_png(path: Path) -> Picture:
    """Read a PNG written by write_png. Raises ValueError for anything else, a damaged one included."""
    data = path.read_bytes()
    if not data.startswith(_PNG_SIGNATURE):
        raise ValueError(f"{path} is not a PNG")
    try:
        width, height, rows = _unpacked(data[len(_PNG_SIGNATURE) :])
    except (struct.error, zlib.error) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
    stride = width * 3 + 1
    if not height or len(rows) != stride * height or any(rows[::stride]):
        raise ValueError(f"{path} is not a plain 8-bit RGB PNG without row filters")
    return Picture(width, height, b"".join(rows[start + 1 : start + stride] for start in range(0, len(rows), stride)))


def _unpacked(chunks: bytes) -> tuple[int, int, bytes]:
    """Width, height and rows of a PNG's chunks; a size of 0 when its colours are of another kind."""
    place, packed, width, height = 0, b"", 0, 0
    while place < len(chunks):
        length, kind = struct.unpack(">I4s", chunks[place : place + 8])
        body = chunks[place + 8 : place + 8 + length]
        if kind == b"IHDR":
            width, height, *rest = struct.unpack(">IIBBBBB", body)
            if rest != [8, 2, 0, 0, 0]:
                return 0, 0, b""
        elif kind == b"IDAT":
            packed += body
        place += 12 + length
    return width, height, zlib.decompress(packed)


def numbered(directory: Path) -> dict[int, Picture]:
    """The pictures NAME.NUMBER.png of a directory, by number, in order."""
    found = {int(match[1]): path for path in directory.glob("*.png") if (match := _NUMBERED.search(path.name))}
    return {number: read_png(found[number]) for number in sorted(found)}


def contact_sheet(pictures: Mapping[int, Picture], *, columns: int, title: str) -> Picture:
    """All pictures in a grid, each with its number below it. They must have one size; ValueError otherwise."""
    sizes = {picture.size for picture in pictures.values()}
    if len(sizes) != 1:
        raise ValueError(f"pictures of one size are needed, not {sorted(sizes)}")
    (width, height) = sizes.pop()
    columns = max(1, min(columns, len(pictures)))
    rows = (len(pictures) + columns - 1) // columns
    canvas = _Canvas(
        2 * _MARGIN + columns * width + (columns - 1) * _GAP,
        2 * _MARGIN + _TITLE_HEIGHT + rows * (height + _LABEL_HEIGHT) + (rows - 1) * _GAP,
    )
    canvas.write(title, _MARGIN, _MARGIN, 4, _TITLE)
    note = f"{len(pictures)} FRAMES"
    canvas.write(note, canvas.width - _MARGIN - (len(note) * 4 - 1) * 4, _MARGIN, 4, _LABEL)
    for place, (number, picture) in enumerate(pictures.items()):
        row, column = divmod(place, columns)
        x = _MARGIN + column * (width + _GAP)
        y = _MARGIN + _TITLE_HEIGHT + row * (height + _LABEL_HEIGHT + _GAP)
        canvas.paste(picture, x, y)
        canvas.write(f"{number:04d}", x, y + height + 4, 2, _LABEL)
    return canvas.picture()


class _Canvas:
    """A picture that is being drawn."""

    def __init__(self, width: int, height: int) -> None:
        self.width, self.height = width, height
        self._pixels = bytearray(_BACKGROUND * (width * height))

    def paste(self, picture: Picture, x: int, y: int) -> None:
        """Put a picture on the canvas, with its upper left corner at the pixel (x, y)."""
        stride = picture.width * 3
        for row in range(picture.height):
            start = ((y + row) * self.width + x) * 3
            self._pixels[start : start + stride] = picture.pixels[row * stride : (row + 1) * stride]

    def write(self, text: str, x: int, y: int, scale: int, colour: bytes) -> None:
        """Write text in capitals, with its upper left corner at the pixel (x, y). A character is 3 x 5 dots of
        ``scale`` pixels; a character that the font lacks is left blank."""
        for character in text.upper():
            for row, bits in enumerate(_FONT.get(character, "00000")):
                for column in range(3):
                    if int(bits) & (4 >> column):
                        self._dot(x + column * scale, y + row * scale, scale, colour)
            x += 4 * scale

    def picture(self) -> Picture:
        """The canvas as a picture."""
        return Picture(self.width, self.height, bytes(self._pixels))

    def _dot(self, x: int, y: int, scale: int, colour: bytes) -> None:
        """Fill a square of ``scale`` pixels; parts outside the canvas are left out."""
        for row in range(y, min(y + scale, self.height)):
            if 0 <= x <= self.width - scale:
                start = (row * self.width + x) * 3
                self._pixels[start : start + scale * 3] = colour * scale
