"""Reading a file that a person wrote - a job file, a settings file - without the surprises of YAML, in bounded time.

YAML 1.1 turns ``shot: 0010`` into 8, ``name: no`` into false, ``1:30`` into 90 and ``2026-01-01`` into a date, and of a
key that is given twice it quietly keeps the second. Here numbers are plain numbers, only true and false are flags,
everything else is text, and a key given twice is an error.

A file has at most 2 MiB and 100,000 values, also with each alias written out, and is nested at most 32 deep; PyYAML
reads some 15,000 values in a second. Control characters (but tab and line breaks), halves of surrogate
pairs and numbers of more than 18 digits are refused by the path of their field.
"""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections.abc import Callable, Hashable, Iterable, Iterator
from itertools import chain, islice
from typing import IO, Any

import yaml

from opencue_sched.errors import InvalidInput

MOST_BYTES = 2 * 1024**2
MOST_VALUES = 100_000
MOST_DEPTH = 32
_MOST_PROBLEMS = 50
_MOST_NUMBER = 10**18
_ODD_IN_A_KEY = re.compile(r"[\x00-\x1f\x7f-\x9f\ud800-\udfff]")
_ODD_CHARACTER = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff]")
_TAG = "tag:yaml.org,2002:"
_NUMBER = r"-?(?:0|[1-9][0-9]*)"


class InvalidFile(InvalidInput):
    """A file, or something in it, that is refused; ``problems`` are sentences with a line or the path of a field."""

    def __init__(self, *problems: str) -> None:
        self.problems = problems
        super().__init__("\n".join(problems))


class _Loader(yaml.SafeLoader):
    """A safe loader with the scalars of YAML 1.2's core, no more."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}  # noqa: RUF012 - PyYAML's own name

    composed = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        self.composed += 1
        if self.composed > MOST_VALUES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            raise yaml.composer.ComposerError(None, None, f"more than {MOST_VALUES:,} values", mark)
        return super().compose_node(parent, index)

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[object] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise yaml.constructor.ConstructorError(None, None, "a key must be plain text", key_node.start_mark)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {str(key)[:60]!r} is given twice", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_SCALARS = {
    "bool": (re.compile(r"^(?:true|True|TRUE|false|False|FALSE)\Z"), "tTfF"),
    "int": (re.compile(rf"^{_NUMBER}\Z"), "-0123456789"),
    "float": (re.compile(rf"^{_NUMBER}\.[0-9]+(?:[eE][-+]?[0-9]+)?\Z"), "-0123456789"),
    "null": (re.compile(r"^(?:~|null|Null|NULL|)\Z"), ["~", "n", "N", ""]),
}
for _name, (_pattern, _first) in _SCALARS.items():
    _Loader.add_implicit_resolver(_TAG + _name, _pattern, list(_first))


def read_text(stream: IO[bytes]) -> str:
    """The text of an open file, of which no more is read than it may have. Raises InvalidFile."""
    return as_text(stream.read(MOST_BYTES + 1))


def as_text(content: bytes) -> str:
    """The text of a file's content. Raises InvalidFile."""
    if len(content) > MOST_BYTES:
        raise InvalidFile(f"has more than {MOST_BYTES // 1024**2} MiB")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidFile(f"not UTF-8 text (byte {error.start + 1})") from error


def read_yaml(text: str, check: Callable[[yaml.Node, str], Iterator[str]] | None = None) -> Any:
    """What YAML text says. ``check`` finds more problems in the nodes of the text. Raises InvalidFile."""
    try:
        loader = _Loader(text)
        try:
            root = loader.get_single_node()
            if root is None:
                return None
            _size(root, {}, 0)
            _refuse(chain(_node_problems(root), check(root, text) if check else ()))
            return _checked(loader.construct_document(root))
        finally:
            loader.dispose()
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        raise InvalidFile(f"line {line}: not YAML: character U+{ord(text[error.position]):04X}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise InvalidFile(f"{where}not YAML: {str(error.problem or error)[:200]}") from error
    except RecursionError as error:
        raise InvalidFile(f"not YAML: nested more than {MOST_DEPTH} deep") from error
    except (ValueError, OverflowError) as error:  # an escape in a text in quotes that stands for no character
        raise InvalidFile(f"not YAML: {str(error)[:200]}") from error


def read_json(text: str) -> Any:
    """What JSON text says. Raises JSONDecodeError for what is none, InvalidFile for what is not to be read."""
    try:
        data = json.loads(text, object_pairs_hook=_without_repeats, parse_int=_int)
    except RecursionError as error:
        raise InvalidFile(f"not JSON: nested more than {MOST_DEPTH} deep") from error
    return _checked(data)


def read_toml(text: str) -> Any:
    """What TOML text says. Raises InvalidFile."""
    try:
        return _checked(tomllib.loads(text))
    except ValueError as error:  # also of a number with too many digits
        raise InvalidFile(f"not TOML: {str(error)[:200]}") from error
    except RecursionError as error:
        raise InvalidFile(f"not TOML: nested more than {MOST_DEPTH} deep") from error


def _checked(data: Any) -> Any:
    _refuse(_value_problems(data))
    return data


def _refuse(problems: Iterable[str]) -> None:
    if found := tuple(islice(problems, _MOST_PROBLEMS)):
        raise InvalidFile(*found)


def _int(digits: str) -> int:
    """A number of JSON; one of more digits than are read is as large as the first that is refused."""
    return int(digits) if len(digits) <= 19 else _MOST_NUMBER


def _size(node: yaml.Node, known: dict[int, tuple[int, int]], depth: int) -> tuple[int, int]:
    """Characters and nodes that ``node`` has with each alias written out, and how deep it is nested. An alias shares a
    node, so a few lines may stand for gigabytes: each node is counted once, and InvalidFile ends the count early."""
    size, height = known.get(id(node), (0, 0))
    if not size:
        size = 1 + (len(node.value) if isinstance(node, yaml.ScalarNode) else 0)
        if depth < MOST_DEPTH:
            for child in _children(node):
                child_size, child_height = _size(child, known, depth + 1)
                size, height = size + child_size, max(height, child_height + 1)
        elif not isinstance(node, yaml.ScalarNode):
            height = 1
        known[id(node)] = size, height
    if depth + height > MOST_DEPTH:
        raise InvalidFile(f"line {node.start_mark.line + 1}: nested more than {MOST_DEPTH} deep")
    if size > MOST_BYTES:
        raise InvalidFile(
            f"line {node.start_mark.line + 1}: has more than {MOST_BYTES // 1024**2} MiB with its aliases written out"
        )
    return size, height


def _children(node: yaml.Node) -> Iterator[yaml.Node]:
    if isinstance(node, yaml.MappingNode):
        for pair in node.value:
            yield from pair
    elif isinstance(node, yaml.SequenceNode):
        yield from node.value


def walk(root: yaml.Node) -> Iterator[tuple[str, yaml.Node, bool]]:
    """Every node with its path, and whether it is a key; each once, however many aliases lead to it."""
    seen: set[int] = set()
    nodes = [("", root, False)]
    while nodes:
        path, node, is_key = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        yield path, node, is_key
        below: list[tuple[str, yaml.Node, bool]] = []
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                name = str(key.value)[:60] if isinstance(key, yaml.ScalarNode) else "?"
                at = f"{path}.{name}" if path else name
                below += [(at, key, True), (at, value, False)]
        elif isinstance(node, yaml.SequenceNode):
            below = [(f"{path}[{position}]", entry, False) for position, entry in enumerate(node.value)]
        nodes += reversed(below)


def _node_problems(root: yaml.Node) -> Iterator[str]:
    """Tags that are not read here, and texts that are not what their tag says: PyYAML stumbles over both."""
    for path, node, _ in walk(root):
        where = f"line {node.start_mark.line + 1}: {path}: " if path else f"line {node.start_mark.line + 1}: "
        kind = node.tag.removeprefix(_TAG)
        if isinstance(node, yaml.ScalarNode):
            if kind != "str" and kind not in _SCALARS:
                yield f"{where}the tag {node.tag[:60]} is not read here"
            elif kind in _SCALARS and not _SCALARS[kind][0].match(node.value):
                yield f"{where}{node.value[:40]!r} is not what its tag !!{kind} says"
            elif kind == "int" and len(node.value) > 19:
                yield f"{where}a number of more than 18 digits"
        elif kind != ("map" if isinstance(node, yaml.MappingNode) else "seq"):
            yield f"{where}the tag {node.tag[:60]} is not read here"


def _value_problems(data: object) -> Iterator[str]:
    """Where there are characters and numbers that are not to be read, and mappings and lists nested too deeply."""
    values: list[tuple[str, object, int]] = [("", data, 0)]
    read = 0
    while values:
        path, value, depth = values.pop()
        at = f"{path}: " if path else ""
        read += 1
        if read > MOST_VALUES:
            yield f"has more than {MOST_VALUES:,} values"
            return
        below: list[tuple[str, object, int]] = []
        if isinstance(value, dict | list) and depth >= MOST_DEPTH:
            yield f"{path[:200]}: nested more than {MOST_DEPTH} deep"
        elif isinstance(value, dict):
            for key, entry in value.items():
                name = ascii(key)[1:-1][:60] if isinstance(key, str) else str(key)[:60]
                below.append((f"{path}.{name}" if path else name, entry, depth + 1))
                if isinstance(key, str) and (odd := _ODD_IN_A_KEY.search(key)):
                    yield f"{below[-1][0]}: the key has the character U+{ord(odd[0]):04X}"
        elif isinstance(value, list):
            below = [(f"{path}[{position}]", entry, depth + 1) for position, entry in enumerate(value)]
        elif isinstance(value, str) and (odd := _ODD_CHARACTER.search(value)):
            yield f"{at}has the character U+{ord(odd[0]):04X}"
        elif isinstance(value, float) and not math.isfinite(value):
            yield f"{at}is no finite number"
        elif isinstance(value, int) and abs(value) >= _MOST_NUMBER:
            yield f"{at}a number of more than 18 digits"
        values += reversed(below)


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        seen: set[str] = set()
        repeated = next(key for key, _ in pairs if key in seen or seen.add(key))  # type: ignore[func-returns-value]
        raise InvalidFile(f"key {repeated[:60]!r} is given twice")
    return mapping
