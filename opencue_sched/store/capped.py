"""Whose work a cap stands over: the shows to look at again when it has changed."""

from __future__ import annotations

from collections.abc import Collection

from sqlalchemy import Connection, text

_SHOWS = text(
    """
    SELECT s.pk_show
    FROM show s
    JOIN (
        SELECT pk_show FROM folder WHERE pk_folder = ANY(CAST(:folders AS varchar[]))
        UNION
        SELECT pk_show FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[])) AND str_state = 'PENDING'
        UNION
        SELECT j.pk_show
        FROM layer_limit ll
        JOIN layer_stat ls ON ls.pk_layer = ll.pk_layer AND ls.int_waiting_count > 0
        JOIN job j ON j.pk_job = ls.pk_job AND j.str_state = 'PENDING'
        WHERE ll.pk_limit_record = ANY(CAST(:limits AS varchar[]))
    ) capped USING (pk_show)
    WHERE s.b_scheduler_managed
    """
)


def shows_under(
    connection: Connection, *, folders: Collection[str], jobs: Collection[str], limits: Collection[str]
) -> frozenset[str]:
    """The managed shows of these folders and pending jobs, and those with frames that wait under these limits."""
    parameters = {"folders": list(folders), "jobs": list(jobs), "limits": list(limits)}
    return frozenset(connection.execute(_SHOWS, parameters).scalars())
