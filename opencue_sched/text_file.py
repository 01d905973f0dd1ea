"""Reading a file that a person wrote - a job file, a settings file - without the surprises of YAML.

YAML 1.1 turns ``shot: 0010`` into 8, ``name: no`` into false, ``1:30`` into 90 and ``2026-01-01`` into a date, and of a
key that is given twice it quietly keeps the second. Here numbers are plain numbers of at most 18 digits, only true and
false are flags, everything else is text, and a key given twice is an error.

A file has at most 2 MiB and 100,000 values, also with each alias written out, and is nested at most 32 deep. Control
characters (but tab and line breaks) and halves of surrogate pairs are refused by the path of their field.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Hashable
from contextlib import suppress
from typing import IO, Any

import yaml

from opencue_sched.errors import InvalidInput

MOST_BYTES = 2 * 1024**2
MOST_VALUES = 100_000
MOST_DEPTH = 32
_ODD_IN_A_KEY = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_ODD_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_NUMBER = r"-?(?:0|[1-9][0-9]{0,17})"
_CUT_OFF = re.compile(r"[ \t]+(#[A-Za-z][A-Za-z0-9_]*#)")
_BLOCKS = ("|", ">")


class InvalidFile(InvalidInput):
    """A file, or something in it, that is refused; ``problems`` are sentences with a line or the path of a field."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class _Loader(yaml.SafeLoader):
    """A safe loader with the tags and scalars of YAML 1.2's core, no more."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name
    yaml_constructors = {  # noqa: RUF012 - PyYAML's own name
        tag: yaml.SafeLoader.yaml_constructors[tag]
        for tag in (None, *(_TAG + kind for kind in ("null", "bool", "int", "float", "str", "seq", "map")))
    }

    def construct_scalar(self, node: Any) -> Any:
        # A # after a space begins a comment in any YAML: ``command: render #IFRAME# --out x`` would be ``render``.
        mark = node.end_mark
        cut_off = isinstance(node, yaml.ScalarNode) and node.style not in _BLOCKS
        if cut_off and (comment := _CUT_OFF.match(mark.buffer, mark.pointer)):
            raise InvalidFile(
                f"line {mark.line + 1}: {comment[1]} and what follows is a comment here; put the text in quotes"
            )
        return super().construct_scalar(node)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        mapping = super().construct_mapping(node, deep)
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"key {key.value[:60]!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return mapping


for _kind, _pattern, _first in (
    ("bool", "(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("int", _NUMBER, "-0123456789"),
    ("float", rf"{_NUMBER}\.[0-9]+(?:[eE][-+]?[0-9]+)?", "-0123456789"),
    ("null", "(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^{_pattern}\Z"), list(_first))


def read_yaml(stream: IO[bytes]) -> Any:
    """What the YAML, or JSON, of an open file says, of which no more is read than it may have. Raises InvalidFile."""
    content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InvalidFile(f"has more than {MOST_BYTES // 1024**2} MiB")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidFile(f"not UTF-8 text (byte {error.start + 1})") from error
    try:
        # PyYAML reads JSON as well, but slowly, and takes neither tabs nor surrogate pairs.
        with suppress(json.JSONDecodeError):
            return _checked(json.loads(text, object_pairs_hook=_without_repeats, parse_int=_int))
        return _checked(yaml.load(text, _Loader))  # noqa: S506 - a safe loader with less
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidFile(f"line {line}: not YAML: character U+{ord(text[error.position]):04X}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidFile(f"{where}not YAML: {str(error.problem or error)[:200]}") from error
    except RecursionError as error:
        raise InvalidFile(f"not YAML: nested more than {MOST_DEPTH} deep") from error
    except (ValueError, OverflowError, KeyError) as error:  # an escape without a character, a text with a wrong tag
        raise InvalidFile(f"not YAML: {str(error)[:200]}") from error


def _checked(data: Any) -> Any:
    """The data. Raises InvalidFile for characters and numbers that are not to be read, and for too many or too deeply
    nested values."""
    values: list[tuple[str, object, int]] = [("", data, 0)]
    read = size = 0
    while values:
        path, value, depth = values.pop()
        read += 1
        size += len(value) if isinstance(value, str) else 0
        if read > MOST_VALUES or size > MOST_BYTES:
            most = f"{MOST_VALUES:,} values or {MOST_BYTES // 1024**2} MiB"
            raise InvalidFile(f"has more than {most}, with each alias written out")
        if depth > MOST_DEPTH:
            raise InvalidFile(f"{path[:200]}: nested more than {MOST_DEPTH} deep")
        if isinstance(value, dict):
            for key, entry in reversed(value.items()):
                name = ascii(key)[1:-1][:60] if isinstance(key, str) else str(key)[:60]
                below = f"{path}.{name}" if path else name
                if isinstance(key, str) and (odd := _ODD_IN_A_KEY.search(key)):
                    raise InvalidFile(f"{below}: the key has the character U+{ord(odd[0]):04X}")
                values.append((below, entry, depth + 1))
        elif isinstance(value, list):
            values += reversed([(f"{path}[{position}]", entry, depth + 1) for position, entry in enumerate(value)])
        elif isinstance(value, str) and (odd := _ODD_CHARACTER.search(value)):
            raise InvalidFile(f"{path or 'the text'}: has the character U+{ord(odd[0]):04X}")
        elif isinstance(value, float) and not math.isfinite(value):
            raise InvalidFile(f"{path or 'the number'}: is no finite number")
    return data


def _int(digits: str) -> int | str:
    """A number of JSON; one of more digits than are read is a text, as in YAML."""
    return int(digits) if len(digits.lstrip("-")) <= 18 else digits


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    key, times = Counter(key for key, _ in pairs).most_common(1)[0] if pairs else ("", 0)
    if times > 1:
        raise InvalidFile(f"key {key[:60]!r} is given twice")
    return dict(pairs)
