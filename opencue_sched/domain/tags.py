"""Tags: how layers name the hosts they may run on.

Layer tags are one text column, ``a|b`` or ``a | b`` (Cuebot writes the second). OpenCue's queries compare them with
every space removed and split on the bar (facts C; trap I-7: a name with spaces inside collapses, ``my tag`` is
``mytag``). Host tags come one a row of ``host_tag``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def normalise_tag(tag: str) -> str:
    """One tag as the queries compare it: without spaces, wherever they are."""
    return tag.replace(" ", "")


def normalise_tags(text: str | None) -> frozenset[str]:
    """``layer.str_tags`` in any spelling of the separator, as a set. Empty and NULL give the empty set.

    Removes spaces and splits on ``|``, exactly as the SQL does, so that a layer the query finds also matches here.
    """
    return frozenset(tag for tag in normalise_tag(text or "").split("|") if tag)


def join_tags(tags: Iterable[str]) -> str:
    """Tags for ``layer.str_tags``, in the order given (sets: sorted), joined as Cuebot joins them.

    The spaces around the bar matter: Cuebot's own host queries use the column as a regular expression that skips them.
    """
    ordered = sorted(tags) if isinstance(tags, (set, frozenset)) else tags
    return " | ".join(dict.fromkeys(tag for tag in map(normalise_tag, ordered) if tag))


def chunk_tags(tags: Iterable[str], size: int) -> list[tuple[str, ...]]:
    """Tags in chunks of ``size``, sorted, so that the same tags always give the same chunks (facts C)."""
    if size < 1:
        raise ValueError(f"a chunk of {size} tags is not possible")
    ordered: Sequence[str] = sorted(set(tags))
    return [tuple(ordered[start : start + size]) for start in range(0, len(ordered), size)]
