"""The five accounting tables of OpenCue, brought to what the proc table says (managed shows, only rows that differ).

Each table is done in one transaction of its own, in three steps: find the rows that differ, lock them in id order (a
row somebody else holds is left for the next pass), sum again under the locks and write. Two triggers of the schema
stand in the way: job_resource raises when cores or GPUs grow past either maximum (it has no unlimited: -1 always
raises, and growing cores raise over GPUs), subscription when cores grow past the burst. A row they would refuse gets
its cap raised together with the count and put back by a second statement; the cap is read under the lock, so nobody's
change of it can be lost.
"""
# ruff: noqa: S608 - the statements are put together from constants of this module only

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, TextClause, text

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
    """One table: its name and the column that identifies a row, how its rows find their show, and its sums.

    ``owner`` joins ``row`` to ``show``. ``sums`` groups procs by ``summed_by``, the expression that equals ``key``.
    ``caps`` are the columns the triggers compare cores and GPUs with (NULL: not compared). ``local_of_ours`` and
    ``local_of_theirs``: whether local procs count, in a show of ours, and in one of Cuebot's. Those are what Cuebot
    takes off its tables when such a proc ends.
    """

    name: str
    key: str
    owner: str
    summed_from: str
    summed_by: str
    caps: tuple[str, str] | None = None
    local_of_ours: bool = True
    local_of_theirs: bool = False

    def local(self, as_cuebot: bool) -> bool:
        """Whether local procs count."""
        return self.local_of_theirs if as_cuebot else self.local_of_ours

    def sums(self, condition: str) -> str:
        return f"""SELECT {self.summed_by} AS id, CAST(sum(proc.int_cores_reserved) AS bigint) AS cores,
                          CAST(sum(proc.int_gpus_reserved) AS bigint) AS gpus
                     FROM {self.summed_from} WHERE {condition} AND (:local OR NOT proc.b_local)
                    GROUP BY {self.summed_by}"""

    def differing(self) -> TextClause:
        return text(
            f"""SELECT counted.{self.key} FROM {self.name} counted {self.owner}
                  LEFT JOIN ({self.sums("proc.pk_show = ANY(:shows)")}) used ON used.id = counted.{self.key}
                 WHERE show.pk_show = ANY(:shows) AND show.b_scheduler_managed = :managed
                   AND (counted.int_cores <> coalesce(used.cores, 0) OR counted.int_gpus <> coalesce(used.gpus, 0))
                 ORDER BY counted.{self.key}"""
        )

    def lock(self) -> TextClause:
        columns = ", ".join((self.key, "int_cores", "int_gpus", *(self.caps or ())))
        return text(
            f"""SELECT {columns} FROM {self.name} WHERE {self.key} = ANY(:ids)
                 ORDER BY {self.key} FOR NO KEY UPDATE SKIP LOCKED"""
        )

    def sums_of_rows(self) -> TextClause:
        return text(self.sums(f"{self.summed_by} = ANY(:ids)"))

    def write(self, *, raising: bool) -> TextClause:
        raised = "".join(f", {cap} = {_RAISED.format(cap=cap)}" for cap in self.cap_columns() if raising)
        return text(
            f"""UPDATE {self.name} SET int_cores = wanted.cores, int_gpus = wanted.gpus{raised}
                  FROM {_WANTED} WHERE {self.key} = wanted.id"""
        )

    def restore(self) -> TextClause:
        caps = ", ".join(
            f"{cap} = wanted.{amount}"
            for cap, amount in zip(self.caps or (), ("cores", "gpus"), strict=True)
            if cap != "NULL"
        )
        return text(f"UPDATE {self.name} SET {caps} FROM {_WANTED} WHERE {self.key} = wanted.id")

    def cap_columns(self) -> list[str]:
        return [cap for cap in self.caps or () if cap != "NULL"]


def refresh_tables(
    engine: Engine, show_ids: Collection[str], *, managed: bool = True, as_cuebot: bool = False
) -> dict[str, int]:
    """Refresh the five tables for those of ``show_ids`` that are managed; returns the rows written per table.

    ``managed`` False: for those that are not (any more). That is right beside a Cuebot that keeps their books, because
    it changes proc and tables in one transaction, and rows are summed under their locks. ``as_cuebot``: count local
    procs as it does, for shows that are Cuebot's or are about to be.
    """
    shows = list(show_ids)
    return {table.name: _refresh(engine, table, shows, managed, as_cuebot) if shows else 0 for table in _TABLES}


def _refresh(engine: Engine, table: _Table, shows: Sequence[str], managed: bool, as_cuebot: bool) -> int:
    local = table.local(as_cuebot)
    wanted = {"shows": shows, "managed": managed, "local": local}
    with engine.begin() as connection:
        differing = list(connection.execute(table.differing(), wanted).scalars())
    written = 0
    for start in range(0, len(differing), _ROWS_PER_TRANSACTION):
        with engine.begin() as connection:
            written += _write(connection, table, differing[start : start + _ROWS_PER_TRANSACTION], local)
    return written


def _write(connection: Connection, table: _Table, ids: Sequence[str], local: bool) -> int:
    locked = {row[0]: row for row in connection.execute(table.lock(), {"ids": list(ids)})}
    sums = connection.execute(table.sums_of_rows(), {"ids": list(locked), "local": local})
    used = {row.id: (row.cores, row.gpus) for row in sums}
    changed = {
        row_id: used.get(row_id, (0, 0))
        for row_id, row in locked.items()
        if used.get(row_id, (0, 0)) != (row[1], row[2])
    }
    refused = {row_id: count for row_id, count in changed.items() if would_be_refused(count, locked[row_id])}
    plain = {row_id: count for row_id, count in changed.items() if row_id not in refused}
    if plain:
        connection.execute(table.write(raising=False), _wanted(plain))
    if refused:
        connection.execute(_QUIET)
        connection.execute(table.write(raising=True), _wanted(refused))
        connection.execute(table.restore(), _wanted({row_id: tuple(locked[row_id][3:]) for row_id in refused}))
    return len(changed)


def would_be_refused(count: tuple[int, int], row: Sequence[Any]) -> bool:
    """Whether a trigger would raise on writing ``count`` (cores, GPUs) to a locked row (id, cores, GPUs, caps...).

    A cap of None is not checked by a trigger.
    """
    _, cores, gpus, *caps = row
    if not caps or (count[0] <= cores and count[1] <= gpus):
        return False
    return any(cap is not None and value > cap for value, cap in zip(count, caps, strict=True))


def _wanted(pairs: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    return {
        "ids": list(pairs),
        "cores": [pair[0] for pair in pairs.values()],
        "gpus": [pair[1] for pair in pairs.values()],
    }


_TABLES = (
    _Table(
        "layer_resource",
        "pk_layer",
        owner="JOIN job USING (pk_job) JOIN show USING (pk_show)",
        summed_from="proc",
        summed_by="proc.pk_layer",
        local_of_theirs=True,
    ),
    _Table(
        "job_resource",
        "pk_job",
        owner="JOIN job USING (pk_job) JOIN show USING (pk_show)",
        summed_from="proc",
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
        owner="JOIN show USING (pk_show)",
        summed_from=(
            "proc JOIN job USING (pk_job) JOIN point ON point.pk_dept = job.pk_dept AND point.pk_show = job.pk_show"
        ),
        summed_by="point.pk_point",
    ),
    _Table(
        "subscription",
        "pk_subscription",
        owner="JOIN show USING (pk_show)",
        summed_from=(
            "proc JOIN host USING (pk_host)"
            " JOIN subscription ON subscription.pk_alloc = host.pk_alloc AND subscription.pk_show = proc.pk_show"
        ),
        summed_by="subscription.pk_subscription",
        caps=("int_burst", "NULL"),
        local_of_ours=False,
    ),
)
