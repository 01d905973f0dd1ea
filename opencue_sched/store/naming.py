"""What people call things: rows by name or id, and the names that come near a mistyped one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from sqlalchemy import Connection, TextClause, text

NAMES_COMPARED = 500
"""Names fetched as candidates for a suggestion, those of about the same length first."""


class Kind(StrEnum):
    """What a name may stand for."""

    SHOW = "show"
    FACILITY = "facility"
    ALLOCATION = "allocation"
    LIMIT = "limit"
    HOST = "host"
    JOB = "job"


@dataclass(frozen=True, slots=True)
class NamedRow:
    """A row that was asked for by name or id."""

    id: str
    name: str


_TABLES = {
    Kind.SHOW: ("show", "pk_show"),
    Kind.FACILITY: ("facility", "pk_facility"),
    Kind.ALLOCATION: ("alloc", "pk_alloc"),
    Kind.LIMIT: ("limit_record", "pk_limit_record"),
    Kind.HOST: ("host", "pk_host"),
    Kind.JOB: ("job", "pk_job"),
}


def _find(kind: Kind) -> TextClause:
    table, key = _TABLES[kind]
    also = {Kind.HOST: "OR str_fqdn = :text", Kind.JOB: "OR str_name = lower(:text)"}.get(kind, "")
    # Of several jobs of one name the live one counts, else the last.
    order = {Kind.JOB: "str_visible_name IS NOT NULL DESC, ts_started DESC"}.get(kind, key)
    return text(
        f"""
        SELECT {key} AS id, str_name AS name FROM {table}
         WHERE str_name = :text OR {key} = :text {also}
         ORDER BY ({key} = :text) DESC, (str_name = :text) DESC, {order} LIMIT 1
        """  # noqa: S608 - only our own constants
    )


def _similar(kind: Kind) -> TextClause:
    table, _ = _TABLES[kind]
    only = "AND str_visible_name IS NOT NULL" if kind is Kind.JOB else ""
    return text(
        f"""
        SELECT str_name FROM {table}
         WHERE (lower(left(str_name, 1)) = lower(left(:text, 1)) OR lower(right(str_name, 1)) = lower(right(:text, 1))
                OR position(lower(:text) IN lower(str_name)) > 0) {only}
         ORDER BY position(lower(:text) IN lower(str_name)) > 0 DESC, abs(length(str_name) - length(:text)), str_name
         LIMIT :most
        """  # noqa: S608 - only our own constants
    )


_FIND = {kind: _find(kind) for kind in Kind}
_SIMILAR = {kind: _similar(kind) for kind in Kind}


def find_row(connection: Connection, kind: Kind, name_or_id: str) -> NamedRow | None:
    """The row of this name or id. A job's name means the live job, else the last one that was called so."""
    row = connection.execute(_FIND[kind], {"text": name_or_id}).one_or_none()
    return None if row is None else NamedRow(row.id, row.name)


def similar_names(connection: Connection, kind: Kind, name: str) -> Sequence[str]:
    """Names that may have been meant by ``name``, as candidates for a closer comparison."""
    return list(connection.execute(_SIMILAR[kind], {"text": name, "most": NAMES_COMPARED}).scalars())
