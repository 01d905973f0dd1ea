"""The layers that count under a limit, how each came to be bound, and what a frame without a licence does to its layer.

A layer is bound by its job file (SPEC), by a person (MANUAL), or since a frame of it ended with the limit's exit status
(AUTO). A Cuebot before V49 does not tell these apart, and its limits have no exit status.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.limits import has_terms
from opencue_sched.store.lookups import same_key
from opencue_sched.store.submit import INSERT_LAYER_LIMITS


@dataclass(frozen=True, slots=True)
class LicenceShortage:
    """What a limit's exit status means: a frame that ended with it got no licence."""

    limit_id: str
    exit_status: int
    delay_minutes: int
    """How long the layer waits, without using a retry; 0: the frame has failed as with any other status."""
    auto_tag: bool
    """Whether the layer is bound to the limit."""


# The limits with these exit statuses. Columns are read from the row as JSON, because schemas before V49 lack them.
_SHORTAGES = text(
    """
    SELECT pk_limit_record AS limit_id, exit_status,
           coalesce(CAST(stored.columns ->> 'int_delay_minutes' AS int), 0) AS delay_minutes,
           coalesce(CAST(stored.columns ->> 'b_auto_tag' AS boolean), true) AS auto_tag
      FROM limit_record
     CROSS JOIN LATERAL (SELECT to_jsonb(limit_record) AS columns) stored
     CROSS JOIN LATERAL CAST(stored.columns ->> 'int_exit_status' AS int) AS exit_status
     WHERE exit_status = ANY(CAST(:statuses AS int[]))
    """
)
# Bind layers to limits, as learnt from exit statuses; a layer that is bound already stays as it is.
_BIND = text(
    """
    INSERT INTO layer_limit (pk_layer_limit, pk_layer, pk_limit_record, str_source)
    SELECT CAST(gen_random_uuid() AS varchar), layer, "limit", 'AUTO'
      FROM (SELECT DISTINCT layer, "limit" FROM json_to_recordset(CAST(:rows AS json))
                                                AS row(layer varchar, "limit" varchar) ORDER BY layer, "limit") short
    ON CONFLICT (pk_layer, pk_limit_record) DO NOTHING
    """
)
# Delays layers, but those that have a longer delay, which keep it. A loop over what is sorted looks the layers up and
# locks them one by one, in the order in which every transaction locks them; each is judged by its row as the lock found
# it.
_DELAY = text(
    f"""
    WITH locked AS (
        SELECT layer.pk_layer, short.until, short.exit_status
          FROM (SELECT layer, current_timestamp + make_interval(mins => max(minutes)) AS until,
                       max(exit_status) AS exit_status
                  FROM json_to_recordset(CAST(:rows AS json)) AS row(layer varchar, minutes int, exit_status int)
                 GROUP BY layer ORDER BY layer) short
         CROSS JOIN LATERAL (
               SELECT pk_layer FROM layer
                WHERE pk_layer = short.layer AND coalesce(ts_start_after < short.until, true)
                  FOR NO KEY UPDATE) layer)
    UPDATE layer SET ts_start_after = locked.until,
                     str_start_after_reason = 'no licence: exit status ' || locked.exit_status
      FROM locked WHERE {same_key("layer.pk_layer", "locked.pk_layer")}
    """  # noqa: S608 - only our own constants
)
# The limits of these layers.
_BOUND_NOW = text(
    """
    SELECT pk_layer AS layer, pk_limit_record AS "limit"
      FROM layer_limit WHERE pk_layer = ANY(CAST(:layers AS varchar[]))
    """
)
# Mark bindings as made by a person (MANUAL): those that were just added, and those that had been learnt (AUTO).
_MARK = text(
    """
    UPDATE layer_limit SET str_source = 'MANUAL'
      FROM limit_record
     WHERE limit_record.pk_limit_record = layer_limit.pk_limit_record
       AND limit_record.str_name = ANY(CAST(:limits AS varchar[]))
       AND layer_limit.pk_layer = ANY(CAST(:layers AS varchar[]))
       AND (layer_limit.str_source = 'AUTO' OR (layer_limit.pk_layer, layer_limit.pk_limit_record) NOT IN (
            SELECT layer, "limit" FROM json_to_recordset(CAST(:before AS json)) AS row(layer varchar, "limit" varchar)))
    """
)
# The layers of pending jobs that are bound to a limit, with their counts.
_BINDINGS = text(
    """
    SELECT job.str_name AS job, layer.str_name AS layer, layer.pk_layer AS layer_id,
           to_jsonb(layer_limit) ->> 'str_source' AS source,
           CAST(to_jsonb(layer_limit) ->> 'ts_created' AS timestamptz) AS since,
           layer_stat.int_waiting_count AS waiting, layer_stat.int_running_count AS running
      FROM layer_limit JOIN layer USING (pk_layer) JOIN layer_stat USING (pk_layer)
      JOIN job ON job.pk_job = layer.pk_job
     WHERE layer_limit.pk_limit_record = :limit AND job.str_state = 'PENDING'
     ORDER BY job.str_name, layer.int_dispatch_order, layer.pk_layer LIMIT :most
    """
)
# Take a limit off all layers that were bound to it by their exit statuses.
_UNBIND_LEARNT = text("DELETE FROM layer_limit WHERE pk_limit_record = :limit AND str_source = 'AUTO'")


def shortages_of(connection: Connection, statuses: Collection[int]) -> dict[int, LicenceShortage]:
    """The shortages of licences that exit statuses stand for, by status: a frame that ended with such a status got no
    licence."""
    rows = connection.execute(_SHORTAGES, {"statuses": sorted(statuses)})
    return {
        row.exit_status: LicenceShortage(row.limit_id, row.exit_status, row.delay_minutes, row.auto_tag) for row in rows
    }


def follow_shortages(connection: Connection, short: Sequence[tuple[str, LicenceShortage]]) -> None:
    """Bind layers, by their ids, to the limits that a frame of them got no licence of, then have them wait."""
    bound = [{"layer": layer, "limit": shortage.limit_id} for layer, shortage in short if shortage.auto_tag]
    if bound:
        connection.execute(_BIND, {"rows": json.dumps(bound)})
    delayed = [
        {"layer": layer, "minutes": shortage.delay_minutes, "exit_status": shortage.exit_status}
        for layer, shortage in short
        if shortage.delay_minutes > 0
    ]
    if delayed:
        connection.execute(_DELAY, {"rows": json.dumps(delayed)})


def bind_by_hand(connection: Connection, layer_ids: Collection[str], limits: Collection[str]) -> None:
    """Bind layers to limits (names) for a person. A binding that was learnt from an exit status (AUTO) becomes the
    person's (MANUAL); one of a job file stays as it is (SPEC)."""
    if not limits:
        return
    layers, names = sorted(layer_ids), sorted(limits)
    before = [row._asdict() for row in connection.execute(_BOUND_NOW, {"layers": layers})]
    connection.execute(INSERT_LAYER_LIMITS, {"rows": json.dumps([{"id": layer, "limits": names} for layer in layers])})
    if has_terms(connection):
        connection.execute(_MARK, {"layers": layers, "limits": names, "before": json.dumps(before)})


def list_bindings(connection: Connection, limit_id: str, *, most: int) -> Sequence[Row[Any]]:
    """The layers of pending jobs under a limit: ``job``, ``layer``, ``source`` (SPEC, AUTO, MANUAL; None before V49),
    ``since``, and frames ``waiting`` and ``running``."""
    return connection.execute(_BINDINGS, {"limit": limit_id, "most": most}).all()


def unbind_learnt(connection: Connection, limit_id: str) -> int:
    """Unbind layers from a limit to which they were bound because of its exit status. Returns how many there were."""
    return connection.execute(_UNBIND_LEARNT, {"limit": limit_id}).rowcount
