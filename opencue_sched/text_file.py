"""Reading a file that a person wrote - a job file, a settings file - without the surprises of YAML.

YAML 1.1 turns ``shot: 0010`` into 8, ``name: no`` into false, ``1:30`` into 90 and ``2026-01-01`` into a date, and of a
key that is given twice it quietly keeps the second. Here numbers are plain numbers of at most 18 digits (JSON may
have longer ones), and those with a fraction keep the text that they were written as. Only true and false are flags,
everything else is text, and a key given twice is an error.

A file has at most 2 MiB. What its values may be is up to the models that take them.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import IO, Any

import yaml

from opencue_sched.errors import InvalidInput

MOST_BYTES = 2 * 1024**2
"""The largest file that is read."""
_TAG = "tag:yaml.org,2002:"
_WHOLE_NUMBER = r"(?:0|-?[1-9][0-9]{0,17})"
"""A whole number. -0 is none, so it stays text."""
_BEFORE_THE_POINT = r"-?(?:0|[1-9][0-9]{0,17})"
"""What stands before the point of a number with a fraction: -0.5 is such a number."""
_TOKEN_AS_COMMENT = re.compile(r"[ \t]+(#[A-Za-z][A-Za-z0-9_]*#)")
"""A token of a frame's command, such as #IFRAME#, where YAML takes it for the beginning of a comment."""
_BLOCK_STYLES = ("|", ">")
"""The styles of a text that spans lines: inside of it nothing is a comment."""


class InvalidFile(InvalidInput):
    """A file, or something in it, that is refused; ``problems`` are sentences with a line or the path of a field."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class WrittenNumber(float):
    """A number with a fraction. As text it is what was written: ``3.10`` may be a version, and then is not ``3.1``.

    ``value`` is the number that the text stands for; None lets Python read the text.
    """

    def __new__(cls, text: str, value: float | None = None) -> WrittenNumber:
        number = super().__new__(cls, text if value is None else value)
        number._text = text
        return number

    _text: str

    def __str__(self) -> str:
        return self._text


def _cut_off(scalar: Any) -> str:
    """What is wrong with a scalar of PyYAML's behind which a token of frames' commands begins a comment; else empty.

    A # after a space does so in any YAML: ``command: render #IFRAME# --out x`` would be ``render``.
    """
    end = scalar.end_mark
    comment = None if scalar.style in _BLOCK_STYLES else _TOKEN_AS_COMMENT.match(end.buffer, end.pointer)
    if comment is None:
        return ""
    return f"line {end.line + 1}: {comment[1]} and what follows is a comment here; put the text in quotes"


def _first_cut_off(text: str) -> str:
    """What ``_cut_off`` says of the first such scalar in a text that is no YAML; else empty. In braces or brackets the
    comment takes what ends them along."""
    with suppress(yaml.YAMLError, ValueError, OverflowError):
        for token in yaml.scan(text, _Loader):
            if isinstance(token, yaml.ScalarToken) and (words := _cut_off(token)):
                return words
    return ""


class _Loader(yaml.SafeLoader):
    """A safe loader with the tags and scalars of YAML 1.2's core, no more. Its methods are PyYAML's hooks."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name
    yaml_constructors = {  # noqa: RUF012 - PyYAML's own name
        tag: yaml.SafeLoader.yaml_constructors[tag]
        # The constructor of None refuses all other tags.
        for tag in (*(_TAG + kind for kind in ("null", "bool", "str", "seq", "map")), None)
    }

    def construct_scalar(self, node: Any) -> Any:
        """The value of a scalar. Raises InvalidFile for a text that a token of frames' commands cuts off."""
        if isinstance(node, yaml.ScalarNode) and (words := _cut_off(node)):
            raise InvalidFile(words)
        return super().construct_scalar(node)

    def construct_yaml_int(self, node: Any) -> Any:
        return self._number(node, super().construct_yaml_int)

    def construct_yaml_float(self, node: Any) -> Any:
        return WrittenNumber(node.value, self._number(node, super().construct_yaml_float))

    def _number(self, node: Any, construct: Callable[[Any], Any]) -> Any:
        """The number that PyYAML's ``construct`` makes of a scalar. Raises ConstructorError for one without digits."""
        try:
            return construct(node)
        except IndexError as error:  # as in ``!!int`` alone: PyYAML looks at the first digit without asking for one
            problem = f"{node.value!r} is not a number"
            raise yaml.constructor.ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        """A mapping. Raises ConstructorError for a key that is given twice."""
        mapping = super().construct_mapping(node, deep)  # refuses keys that are lists or mappings
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"key {key.value[:60]!r} is given twice"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return mapping


_Loader.add_constructor(_TAG + "int", _Loader.construct_yaml_int)
_Loader.add_constructor(_TAG + "float", _Loader.construct_yaml_float)
# What an unquoted text is, and the characters that such a text begins with: PyYAML tries the pattern for these alone.
for _kind, _pattern, _first_characters in (
    ("bool", "(?:true|True|TRUE|false|False|FALSE)", "tTfF"),
    ("int", _WHOLE_NUMBER, "-0123456789"),
    ("float", rf"{_BEFORE_THE_POINT}\.[0-9]+(?:[eE][-+]?[0-9]+)?", "-0123456789"),
    ("null", "(?:~|null|Null|NULL|)", ["~", "n", "N", ""]),
):
    _Loader.add_implicit_resolver(_TAG + _kind, re.compile(rf"^{_pattern}\Z"), list(_first_characters))


def read_yaml(stream: IO[bytes]) -> Any:
    """What an open file of YAML or JSON says. Raises InvalidFile, also for a file of more than MOST_BYTES, of which no
    more is read."""
    content = stream.read(MOST_BYTES + 1)
    if len(content) > MOST_BYTES:
        raise InvalidFile(f"has more than {MOST_BYTES // 1024**2} MiB")
    try:
        text = content.decode("utf-8-sig")
        # PyYAML reads JSON as well, but slowly, and takes neither tabs nor surrogate pairs.
        with suppress(json.JSONDecodeError):
            return json.loads(
                text, object_pairs_hook=_without_repeats, parse_float=WrittenNumber, parse_int=_whole_number
            )
        return yaml.load(text, _Loader)  # noqa: S506 - a safe loader with less
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidFile(f"line {line}: not YAML: character U+{ord(text[error.position]):04X}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = f"{where}not YAML: {str(error.problem or error)[:200]}"
        raise InvalidFile(_first_cut_off(text) or problem) from error
    except RecursionError as error:
        raise InvalidFile("not YAML: nested too deep") from error
    except InvalidFile:  # a ValueError that says already what is wrong
        raise
    # Not UTF-8, an escape without a character, a number of thousands of digits, a text with a wrong tag.
    except (ValueError, OverflowError, KeyError) as error:
        raise InvalidFile(f"not YAML: {str(error)[:200]}") from error


def _whole_number(text: str) -> int | str:
    """A whole number of JSON. -0 stays text, as in YAML: nobody writes a number so."""
    return text if text == "-0" else int(text)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON, from its keys and values. Raises InvalidFile for a key that is given twice."""
    for key, times in Counter(key for key, _ in pairs).items():
        if times > 1:
            raise InvalidFile(f"key {key[:60]!r} is given twice")
    return dict(pairs)
