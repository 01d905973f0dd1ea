"""Arrays as PostgreSQL reads them. The driver writes a list as an ARRAY expression, of which the server parses each
element as a value of its own: a thousand ids, or numbers, take it several times as long as a literal does."""

from __future__ import annotations

from collections.abc import Iterable

_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"'})


def array(values: Iterable[str | int]) -> str:
    """The literal of an array of texts or integers, to be bound where a statement casts it to its type."""
    return "{" + ",".join(str(value) if isinstance(value, int) else _quoted(value) for value in values) + "}"


def _quoted(value: str) -> str:
    return f'"{value.translate(_ESCAPED)}"'
