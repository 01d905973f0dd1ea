"""Arrays as PostgreSQL reads them. The driver writes a list as an ARRAY expression, of which the server parses each
element as a value of its own: a thousand ids, or numbers, take it several times as long as a literal does."""

from __future__ import annotations

from collections.abc import Iterable

_ESCAPED = str.maketrans({"\\": "\\\\", '"': '\\"'})


def texts(values: Iterable[str]) -> str:
    """The literal of an array of texts, to be bound where a statement casts it to its type."""
    values = list(values)
    if not values:
        return "{}"
    joined = "".join(values)
    if '"' in joined or "\\" in joined:
        values = [value.translate(_ESCAPED) for value in values]
    return '{"' + '","'.join(values) + '"}'


def numbers(values: Iterable[int | None]) -> str:
    """The literal of an array of integers, or of NULLs, to be bound where a statement casts it to its type."""
    return "{" + repr(list(values))[1:-1].replace("None", "NULL") + "}"


def booleans(values: Iterable[bool]) -> str:
    """The literal of an array of booleans, to be bound where a statement casts it to its type."""
    return "{" + ",".join("t" if value else "f" for value in values) + "}"
