"""The five accounting tables of OpenCue, brought to what the proc table says (managed shows, only rows that differ).

Each table is done in one transaction of its own, in three steps: find the rows that differ, lock them in id order (a
row that is locked is left for the next pass), sum again under the locks and write. Two triggers of the schema
stand in the way: job_resource raises when cores or GPUs grow past either maximum (it has no unlimited: -1 always
raises, and growing cores raise over GPUs), subscription when cores grow past the burst. So a row gets its caps raised
together with the count and put back by a second statement; they are read under the lock, so nobody's change of them
can be lost.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, TextClause, text

from opencue_sched.domain.units import INT_MAX
from opencue_sched.store.pending import countable

# ruff: noqa: S608 - the statements are put together from constants of this module only

_ROWS_PER_TRANSACTION = 500
_WANTED = (
    "unnest(CAST(:ids AS varchar[]), CAST(:cores AS bigint[]), CAST(:gpus AS bigint[])) AS wanted(id, cores, gpus)"
)
# Our triggers on caps would announce the raise and the restoration as changes, and keep bookings from these vertices.
_QUIET = text("SET LOCAL opencue_sched.quiet_caps = 'on'; SET LOCAL opencue_sched.lifts_caps = 'on'")
# Any value other than the present one keeps the trigger from comparing.
_RAISED = "CASE WHEN {cap} = 2147483647 THEN 2147483646 ELSE 2147483647 END"


@dataclass(frozen=True, slots=True)
class _Table:
    """A table and its key; the joins from a row to its show; the procs, and the expression of them that is the key.

    ``caps`` are the columns the triggers compare cores, and GPUs, with. ``local``: whether local procs count in a show
    of ours, and in one of Cuebot's, which takes no more off when such a proc ends.
    """

    name: str
    key: str
    summed_by: str
    owner: str = "JOIN show USING (pk_show)"
    summed_from: str = "proc"
    caps: tuple[str, ...] = ()
    local: tuple[bool, bool] = (True, False)

    def sums(self, condition: str) -> str:
        cores, gpus = (
            f"CAST(LEAST(sum({countable(column)}), {INT_MAX}) AS bigint)"  # what each of the tables can hold
            for column in ("proc.int_cores_reserved", "proc.int_gpus_reserved")
        )
        return f"""SELECT {self.summed_by} AS id, {cores} AS cores, {gpus} AS gpus
                     FROM {self.summed_from} WHERE {condition} AND (:local OR NOT proc.b_local)
                    GROUP BY {self.summed_by}"""

    def differing(self) -> TextClause:
        return text(
            f"""SELECT counted.{self.key} FROM {self.name} counted {self.owner}
                  LEFT JOIN ({self.sums("proc.pk_show = ANY(:shows)")}) used ON used.id = counted.{self.key}
                 WHERE show.pk_show = ANY(:shows) AND (show.b_scheduler_managed OR :as_cuebot)
                   AND (counted.int_cores <> coalesce(used.cores, 0) OR counted.int_gpus <> coalesce(used.gpus, 0))
                 ORDER BY counted.{self.key}"""
        )

    def lock(self) -> TextClause:
        columns = ", ".join((self.key, "int_cores", "int_gpus", *self.caps))
        return text(
            f"""SELECT {columns} FROM {self.name} WHERE {self.key} = ANY(:ids)
                 ORDER BY {self.key} FOR NO KEY UPDATE SKIP LOCKED"""
        )

    def update(self, *changes: str) -> TextClause:
        return text(f"UPDATE {self.name} SET {', '.join(changes)} FROM {_WANTED} WHERE {self.key} = wanted.id")


def refresh_tables(engine: Engine, show_ids: Collection[str], *, as_cuebot: bool = False) -> dict[str, int]:
    """Refresh the five tables for those of ``show_ids`` that are managed; returns the rows written per table.

    ``as_cuebot``: also for those that are not (any more), and with local procs as Cuebot counts them. That is right
    beside a Cuebot that keeps their books, because it changes proc and tables in one transaction, and rows are summed
    under their locks.
    """
    written = dict.fromkeys((table.name for table in _TABLES), 0)
    for table in _TABLES:
        local = table.local[as_cuebot]
        with engine.begin() as connection:
            wanted = {"shows": list(show_ids), "as_cuebot": as_cuebot, "local": local}
            differing = connection.execute(table.differing(), wanted).scalars().all()
        for start in range(0, len(differing), _ROWS_PER_TRANSACTION):
            with engine.begin() as connection:
                rows = differing[start : start + _ROWS_PER_TRANSACTION]
                written[table.name] += _write(connection, table, rows, local)
    return written


def _write(connection: Connection, table: _Table, ids: Sequence[str], local: bool) -> int:
    locked = {row[0]: row for row in connection.execute(table.lock(), {"ids": ids})}
    sums = connection.execute(text(table.sums(f"{table.summed_by} = ANY(:ids)")), {"ids": list(locked), "local": local})
    used = dict.fromkeys(locked, (0, 0)) | {row.id: (row.cores, row.gpus) for row in sums}
    changed = {row_id: count for row_id, count in used.items() if count != tuple(locked[row_id][1:3])}
    if changed:
        raised = (f"{cap} = {_RAISED.format(cap=cap)}" for cap in table.caps)
        connection.execute(_QUIET)
        connection.execute(
            table.update("int_cores = wanted.cores", "int_gpus = wanted.gpus", *raised), _wanted(changed)
        )
    if changed and table.caps:
        restored = (f"{cap} = wanted.{unit}" for cap, unit in zip(table.caps, ("cores", "gpus"), strict=False))
        caps = {row_id: (*locked[row_id][3:], 0) for row_id in changed}
        connection.execute(table.update(*restored), _wanted(caps))
    return len(changed)


def _wanted(amounts: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    cores, gpus, *_ = zip(*amounts.values(), strict=True)
    return {"ids": list(amounts), "cores": list(cores), "gpus": list(gpus)}


_TABLES = (
    _Table(
        "layer_resource",
        "pk_layer",
        owner="JOIN job USING (pk_job) JOIN show USING (pk_show)",
        summed_by="proc.pk_layer",
        local=(True, True),
    ),
    _Table(
        "job_resource",
        "pk_job",
        owner="JOIN job USING (pk_job) JOIN show USING (pk_show)",
        summed_by="proc.pk_job",
        caps=("int_max_cores", "int_max_gpus"),
    ),
    _Table(
        "folder_resource",
        "pk_folder",
        owner="JOIN folder USING (pk_folder) JOIN show USING (pk_show)",
        summed_from="proc JOIN job USING (pk_job)",
        summed_by="job.pk_folder",
    ),
    _Table(
        "point",
        "pk_point",
        summed_from=(
            "proc JOIN job USING (pk_job) JOIN point ON point.pk_dept = job.pk_dept AND point.pk_show = job.pk_show"
        ),
        summed_by="point.pk_point",
    ),
    _Table(
        "subscription",
        "pk_subscription",
        summed_from=(
            "proc JOIN host USING (pk_host)"
            " JOIN subscription ON subscription.pk_alloc = host.pk_alloc AND subscription.pk_show = proc.pk_show"
        ),
        summed_by="subscription.pk_subscription",
        caps=("int_burst",),
        local=(False, False),
    ),
)
