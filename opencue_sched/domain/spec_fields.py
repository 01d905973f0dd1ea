"""Reading a mapping that a person wrote, key by key, noting every problem instead of stopping at the first."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from opencue_sched.domain.command import RESERVED_VARIABLES
from opencue_sched.domain.names import ENVIRONMENT_WIDTH
from opencue_sched.domain.units import CENTICORES_PER_CORE

_SIZE = re.compile(r"^\s*([0-9]+(?:\.[0-9]+)?)\s*([KMGT])(?:i?B)?\s*$", re.IGNORECASE)
_KB_PER_UNIT = {"K": 1, "M": 1024, "G": 1024**2, "T": 1024**3}
INT_MAX = 2**31 - 1
"""The most OpenCue's integer columns hold."""

_MOST_KB = 2**40
_NAME = re.compile(r"(?!\.+\Z)[A-Za-z0-9_.-]+\Z")
_VARIABLE = re.compile(r"[^\s=\x00-\x1f]+\Z")
_LONGEST = 500
"""Characters of a path, and of what is said of it: a value may have millions."""
_LINE_OR_TAB = re.compile(r"[\t\n\r]")
NAME_CHARACTERS = "letters, digits, '_', '-' and '.'"


def near(word: str, words: Iterable[str]) -> str:
    """``; did you mean x?`` for a mistyped word, or nothing."""
    close = difflib.get_close_matches(word[:64], list(words), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def size_kb(text: str) -> int | None:
    """A size such as ``512MiB``, ``2G`` or ``1.5GB`` in KB, or None. All units are powers of 1024."""
    match = _SIZE.match(text)
    return None if match is None else round(float(match.group(1)) * _KB_PER_UNIT[match.group(2).upper()])


class Fields:
    """One mapping. Every method reads one key; a wrong value is noted as ``path.key: problem`` and replaced by the
    default, so that reading goes on. Keys nobody has asked for when :meth:`refuse_unknown` is called are noted too."""

    def __init__(self, data: object, path: str, problems: list[str]) -> None:
        self.path = path
        self.problems = problems
        self._asked: list[str] = []
        self._data: Mapping[Any, Any] = data if isinstance(data, Mapping) else {}
        self._readable = isinstance(data, Mapping)
        if not self._readable:
            problems.append(f"{path or 'job file'}: expected a mapping of keys, found {_kind(data)}")

    def at(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def wrong(self, key: str, problem: str) -> None:
        self.problems.append(f"{self.at(key)[:_LONGEST]}: {problem[:_LONGEST]}")

    def given(self, key: str) -> Any:
        """The raw value; None when the key is absent or empty."""
        self._asked.append(key)
        return self._data.get(key)

    def has(self, key: str) -> bool:
        return self._data.get(key) is not None

    def refuse_unknown(self) -> None:
        for key in self._data:
            if key not in self._asked:
                self.wrong(str(key), f"unknown key{near(str(key), self._asked)}")

    def text(
        self, key: str, *, width: int, default: str | None = None, required: bool = False, lines: bool = False
    ) -> str | None:
        """Text of at most ``width`` characters, the most its column holds, on one line unless it may have ``lines``.
        Whole numbers are taken as text."""
        value = self.given(key)
        if value is None:
            if required and default is None and self._readable:
                self.wrong(key, "is missing" if key not in self._data else "is empty")
            return default
        if isinstance(value, int) and not isinstance(value, bool):
            value = str(value)
        if not isinstance(value, str):
            self.wrong(key, f"expected text, found {_kind(value)}")
            return default
        value = value.strip()
        if not value:
            self.wrong(key, "is empty")
        elif "\0" in value:
            self.wrong(key, "contains a NUL character")
        elif not lines and _LINE_OR_TAB.search(value):
            self.wrong(key, "contains a line break or a tab")
        elif len(value) > width:
            self.wrong(key, f"has {len(value)} characters; {width} is the most OpenCue stores")
        else:
            return value
        return default

    def name(self, key: str, *, width: int, default: str | None = None, required: bool = False) -> str | None:
        """A name, which ends up in paths and commands: letters, digits, ``_``, ``-`` and ``.`` only."""
        value = self.text(key, width=width, default=default, required=required)
        if value is not None and not _NAME.match(value):
            self.wrong(key, f"{value!r} may contain only {NAME_CHARACTERS}")
            return None
        return value

    def integer(self, key: str, *, default: int, least: int, most: int = INT_MAX) -> int:
        value = self.optional_integer(key, least=least, most=most)
        return default if value is None else value

    def optional_integer(self, key: str, *, least: int, most: int = INT_MAX) -> int | None:
        value = self.given(key)
        if value is None:
            return None
        if not isinstance(value, int) or isinstance(value, bool):
            self.wrong(key, f"expected a whole number, found {_kind(value)}")
        elif not least <= value <= most:
            self.wrong(key, f"{value} is not between {least} and {most}")
        else:
            return value
        return None

    def centicores(self, key: str, *, default: int) -> int:
        value = self.optional_centicores(key)
        return default if value is None else value

    def optional_centicores(self, key: str) -> int | None:
        """Cores, as a number that may have a fraction, in centicores."""
        value = self.given(key)
        if value is None:
            return None
        if not isinstance(value, (int, float)) or isinstance(value, bool):
            self.wrong(key, f"expected a number of cores, found {_kind(value)}")
        elif abs(value) > INT_MAX / CENTICORES_PER_CORE or not math.isfinite(value):
            self.wrong(key, f"{value} is not a number of cores")
        elif value != 0 and round(value * CENTICORES_PER_CORE) == 0:
            self.wrong(key, f"{value} is less than a hundredth of a core, the least OpenCue counts")
        else:
            return round(value * CENTICORES_PER_CORE)
        return None

    def flag(self, key: str, *, default: bool) -> bool:
        value = self.given(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.wrong(key, f"expected true or false, found {_kind(value)}")
            return default
        return value

    def memory_kb(self, key: str, *, default: int, least: int) -> int:
        """A size with a unit (``2GiB``), or a whole number of KB."""
        value = self.given(key)
        if value is None:
            return default
        size = value if isinstance(value, int) and not isinstance(value, bool) else None
        if isinstance(value, str):
            size = size_kb(value)
        if size is None:
            self.wrong(key, f"{value!r} is not a size; write 512MiB, 2GiB or a number of KB")
        elif size < least:
            self.wrong(key, f"{value!r} is {size} KB; {least} KB is the least (units: 512MiB, 2GiB)")
        elif size > _MOST_KB:
            self.wrong(key, f"{value!r} is more than any host has")
        else:
            return size
        return default

    def items(self, key: str) -> list[tuple[str, Any]]:
        """The entries of a list, each with its path. One entry may stand without a list."""
        value = self.given(key)
        if value is None:
            return []
        entries = value if isinstance(value, (list, tuple)) else [value]
        return [(f"{self.at(key)}[{position}]", entry) for position, entry in enumerate(entries)]

    def words(self, key: str, *, separators: str, default: tuple[str, ...], width: int) -> tuple[str, ...]:
        """Names in a list, or in one text separated by any of ``separators``; without repeats, in order."""
        value = self.given(key)
        if value is None:
            return default
        entries = re.split(f"[{re.escape(separators)}]", value) if isinstance(value, str) else value
        if not isinstance(entries, (list, tuple)):
            entries = [entries]
        words: dict[str, None] = {}
        for entry in entries:
            word = str(entry).strip() if isinstance(entry, (str, int)) and not isinstance(entry, bool) else None
            if word is None:
                self.wrong(key, f"expected names, found {_kind(entry)}")
            elif not word:
                continue
            elif " " in word:
                self.wrong(key, f"{word!r} contains a space, which OpenCue ignores; write {word.replace(' ', '')!r}")
            elif not _NAME.match(word):
                self.wrong(key, f"{word!r} may contain only {NAME_CHARACTERS}")
            elif len(word) > width:
                self.wrong(key, f"{word!r} has {len(word)} characters; {width} is the most OpenCue stores")
            else:
                words[word] = None
        return tuple(words)

    def environment(self, key: str) -> dict[str, str]:
        """Variables and their values; numbers are taken as text."""
        value = self.given(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.wrong(key, f"expected a mapping of variables, found {_kind(value)}")
            return {}
        variables = {}
        for name, word in value.items():
            problem = _variable_problem(name, word)
            if problem:
                self.wrong(f"{key}.{name}", problem)
            else:
                variables[str(name)] = str(word)
        return variables


def _variable_problem(name: object, value: object) -> str | None:
    if not isinstance(name, str) or not _VARIABLE.match(name):
        return "is not the name of a variable; it has no spaces and no '='"
    if name in RESERVED_VARIABLES:
        return "is set by the scheduler; use another name"
    if isinstance(value, bool) or not isinstance(value, (str, int, float)):
        return f"expected text, found {_kind(value)}; put the value in quotes"
    if "\0" in str(value):
        return "contains a NUL character"
    longest = max(len(name), len(str(value)))
    if longest > ENVIRONMENT_WIDTH:
        return f"has {longest} characters; {ENVIRONMENT_WIDTH} is the most OpenCue stores"
    return None


def _kind(value: object) -> str:
    kinds = {type(None): "nothing", bool: "true or false", str: "text", list: "a list", dict: "a mapping"}
    kinds |= {int: "a whole number", float: "a number"}
    return kinds.get(type(value), type(value).__name__)
