"""What people call things: rows by name or id, and names that a mistyped one may have meant."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import NamedTuple

from sqlalchemy import Connection, text

NAMES_COMPARED = 500
"""Names that ``similar_names`` returns at most: the candidates for a suggestion or a completion."""


class Kind(StrEnum):
    """What a name may stand for."""

    SHOW = "show"
    FACILITY = "facility"
    ALLOCATION = "allocation"
    LIMIT = "limit"
    HOST = "host"
    JOB = "job"
    SERVICE = "service"


class NamedRow(NamedTuple):
    """A row that was asked for by name or id."""

    id: str
    name: str


def id_of(row: NamedRow | None) -> str | None:
    """The id of a row that an option may name; None where the option is not given."""
    return None if row is None else row.id


_TABLES = {Kind.ALLOCATION: "alloc", Kind.LIMIT: "limit_record"}
"""Tables with another name than their kind. The key column of every table is ``pk_{table}``."""


def find_rows(connection: Connection, kind: Kind, names_or_ids: Collection[str]) -> dict[str, NamedRow]:
    """The rows of these names or ids, by the name or id that was asked for; what is not found is absent.

    A job's name means the live job of that name, else the last one that had it. A show is also found by an alias. A
    host is also found by its full name. Names of hosts and jobs are found in upper and lower case alike.
    """
    table = _TABLES.get(kind, kind.value)
    key = f"pk_{table}"
    other_names = {
        Kind.HOST: "OR lower(asked) IN (lower(str_fqdn), lower(str_name))",
        Kind.JOB: "OR str_name = lower(asked)",
        Kind.SHOW: "OR pk_show IN (SELECT pk_show FROM show_alias WHERE show_alias.str_name = asked)",
    }.get(kind, "")
    order = {
        Kind.HOST: "(str_fqdn = asked) DESC NULLS LAST, pk_host",
        Kind.JOB: "str_visible_name IS NOT NULL DESC, ts_started DESC",
    }.get(kind, key)
    statement = f"""
        SELECT asked, found.* FROM unnest(CAST(:names AS varchar[])) AS asked
         CROSS JOIN LATERAL (
             SELECT {key}, str_name FROM {table} WHERE str_name = asked OR {key} = asked {other_names}
              ORDER BY ({key} = asked) DESC, (str_name = asked) DESC, {order} LIMIT 1) found
        """  # noqa: S608 - only our own constants
    rows = connection.execute(text(statement), {"names": list(names_or_ids)})
    return {asked: NamedRow(*row) for asked, *row in rows}


def similar_names(connection: Connection, kind: Kind, name: str) -> Sequence[str]:
    """Names that may have been meant by ``name``; of jobs, those of live ones.

    Names that begin with it come first, then names that contain it, then names that share its first or last character.
    Of each of these, names of about the same length come first.
    """
    live = "AND str_visible_name IS NOT NULL" if kind is Kind.JOB else ""
    statement = f"""
        SELECT str_name FROM {_TABLES.get(kind, kind.value)}
         WHERE (lower(left(str_name, 1)) = lower(left(:text, 1)) OR lower(right(str_name, 1)) = lower(right(:text, 1))
                OR position(lower(:text) IN lower(str_name)) > 0) {live}
         ORDER BY starts_with(str_name, :text) DESC, position(lower(:text) IN lower(str_name)) > 0 DESC,
                  abs(length(str_name) - length(:text)), str_name LIMIT :most
        """  # noqa: S608 - only our own constants
    return list(connection.execute(text(statement), {"text": name, "most": NAMES_COMPARED}).scalars())


# What to call rows of these ids, whatever they are.
_NAMES_BY_ID = text(
    """
    SELECT pk_show, str_name FROM show WHERE pk_show = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_facility, str_name FROM facility WHERE pk_facility = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_alloc, str_name FROM alloc WHERE pk_alloc = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_folder, str_name FROM folder WHERE pk_folder = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_limit_record, str_name FROM limit_record WHERE pk_limit_record = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_job, str_name FROM job WHERE pk_job = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_layer, layer.str_name || ' of ' || job.str_name
      FROM layer JOIN job USING (pk_job) WHERE pk_layer = ANY(CAST(:ids AS varchar[]))
    UNION ALL SELECT pk_proc, frame.str_name || ' of ' || job.str_name || ' on ' || host.str_name
      FROM proc JOIN frame USING (pk_frame) JOIN job ON job.pk_job = proc.pk_job JOIN host USING (pk_host)
     WHERE pk_proc = ANY(CAST(:ids AS varchar[]))
    """
)


def names_by_id(connection: Connection, ids: Collection[str]) -> dict[str, str]:
    """Names of shows, facilities, allocations, folders, limits, jobs, layers and procs, by id; unknown ids are absent.

    A layer is called ``render of JOB``, a proc ``0001-render of JOB on HOST``.
    """
    return {row[0]: row[1] for row in connection.execute(_NAMES_BY_ID, {"ids": sorted(set(ids))})}
