"""Names of folders, jobs, layers, frames, hosts and operating systems, and how they are written for people."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

FOLDER_NAME_WIDTH = 36
"""The most characters of a folder's name, as its column has it."""
NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]+\Z")
"""A name that ends up in paths and commands."""
NAME_CHARACTERS = "letters, digits, '_', '-' and '.'"


def plural(number: float | None, noun: str, several: str | None = None) -> str:
    """A number with its noun: ``1 frame``, ``2 frames``. ``several``: the plural that does not just end in s."""
    return f"{number} {noun if number == 1 else several or noun + 's'}"


def near(word: str, words: Iterable[str]) -> str:
    """``; did you mean x?`` for a mistyped word where one of ``words`` is like it, else an empty text."""
    close = difflib.get_close_matches(word[:64], list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


_NUMBERED = re.compile(r"(.*?)([0-9]+)\Z", re.DOTALL)


def name_ranges(names: Iterable[str]) -> list[str]:
    """Names for people, in order. Three or more whose numbers follow each other are one text: ``r01 to r06``."""
    runs: list[list[str]] = []
    before: tuple[str, int, int] | None = None
    for name in sorted(set(names)):
        found = _NUMBERED.match(name)
        key = (found[1], len(found[2]), int(found[2])) if found else None
        follows = key is not None and before is not None and key == (*before[:2], before[2] + 1)
        runs[-1:] = [[*runs[-1], name]] if follows else [*runs[-1:], [name]]
        before = key
    return [words for run in runs for words in ([f"{run[0]} to {run[-1]}"] if len(run) > 2 else run)]


def frame_name(number: int, layer_name: str) -> str:
    """The name of a frame: ``0012-render``, and ``-012-render`` for frame -12 (Java's and Python's ``%04d`` agree)."""
    return f"{number:04d}-{layer_name}"


def is_address(host_name: str) -> bool:
    """Whether a host is known by an IP address instead of a name."""
    return ":" in host_name or host_name.replace(".", "").isdigit()


def short_name(host_name: str) -> str:
    """A host's name without its domain; addresses stay whole."""
    return host_name if is_address(host_name) else host_name.partition(".")[0]


def same_host(name: str, other: str) -> bool:
    """Whether two names may be those of one host: case and domain aside."""
    return short_name(name).lower() == short_name(other).lower()


def os_names(text: str | None) -> tuple[str, ...]:
    """``host_stat.str_os`` as the list Cuebot reads it as: separated by commas, spaces around them ignored."""
    return tuple(name for name in (part.strip() for part in (text or "").split(",")) if name)
