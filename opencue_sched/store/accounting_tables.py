"""The five accounting tables of OpenCue, brought to what the proc table says. Only rows that differ are written.

Each table is done by itself, in three steps: find the rows that differ; lock them in id order, where a row that
another transaction has locked is left for the next time; sum again under the locks and write. The last two are one
transaction for every _ROWS_PER_TRANSACTION rows.

Two triggers of the schema stand in the way. That of job_resource raises an error when cores or GPUs grow and either is
then above its maximum: -1, which is no cap elsewhere, is always exceeded, and cores alone cannot grow while GPUs are
above theirs. That of subscription raises one when cores grow past the burst. Both compare only
where the cap stays as it is. So one statement writes the amounts together with another cap, and a second one puts the
cap back. The caps are read under the lock, so nobody's change of them can be lost.
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
"""How many rows are locked together, so that bookings wait for them briefly. With fewer, a refresh of a large farm
takes more transactions."""
_WANTED = (
    "unnest(CAST(:ids AS varchar[]), CAST(:cores AS bigint[]), CAST(:gpus AS bigint[])) AS wanted(id, cores, gpus)"
)
# Our own triggers on caps would announce both changes of the cap, and keep bookings from that job or subscription.
_QUIET = text("SET LOCAL opencue_sched.quiet_caps = 'on'; SET LOCAL opencue_sched.lifts_caps = 'on'")
# A cap other than the present one, whichever that is: the schema's trigger compares nothing then.
_OTHER_CAP = "CASE WHEN {cap} = 2147483647 THEN 2147483646 ELSE 2147483647 END"


@dataclass(frozen=True, slots=True)
class _Table:
    """One of the five tables: what its rows are, and which procs each row sums."""

    name: str
    key: str
    """The column of the table's key."""
    summed_by: str
    """The key of the row that a proc counts in, as an expression over ``summed_from``."""
    owner: str = "JOIN show USING (pk_show)"
    """The joins from a row to its show."""
    summed_from: str = "proc"
    """The procs, and what is joined to them to know their row."""
    caps: tuple[str, ...] = ()
    """The columns with which a trigger of the schema compares cores and, if there is a second one, GPUs."""
    sums_local_procs: bool = True
    """Whether local procs (on a user's own machine) count where this program keeps the show's figures."""
    cuebot_sums_local_procs: bool = False
    """Whether they count where Cuebot keeps them: only in a table that Cuebot counts down when such a proc ends."""

    def sums(self, condition: str) -> str:
        """The query of what procs that meet ``condition`` take, by the key of their row."""
        cores, gpus = (
            f"CAST(LEAST(sum({countable(column)}), {INT_MAX}) AS bigint)"  # what each of the tables can hold
            for column in ("proc.int_cores_reserved", "proc.int_gpus_reserved")
        )
        return f"""SELECT {self.summed_by} AS id, {cores} AS cores, {gpus} AS gpus
                     FROM {self.summed_from} WHERE {condition} AND (:local OR NOT proc.b_local)
                    GROUP BY {self.summed_by}"""

    def differing(self) -> TextClause:
        """The query of the keys of rows that say anything else than their procs."""
        return text(
            f"""SELECT counted.{self.key} FROM {self.name} counted {self.owner}
                  LEFT JOIN ({self.sums("proc.pk_show = ANY(:shows)")}) used ON used.id = counted.{self.key}
                 WHERE show.pk_show = ANY(:shows) AND (show.b_scheduler_managed OR :as_cuebot)
                   AND (counted.int_cores <> coalesce(used.cores, 0) OR counted.int_gpus <> coalesce(used.gpus, 0))
                 ORDER BY counted.{self.key}"""
        )

    def lock(self) -> TextClause:
        """The query that locks rows, and answers with their keys, amounts and caps, in this order."""
        columns = ", ".join((self.key, "int_cores", "int_gpus", *self.caps))
        return text(
            f"""SELECT {columns} FROM {self.name} WHERE {self.key} = ANY(:ids)
                 ORDER BY {self.key} FOR NO KEY UPDATE SKIP LOCKED"""
        )

    def update(self, *changes: str) -> TextClause:
        """The statement that makes ``changes`` in rows, each with the amounts that are wanted for it."""
        return text(f"UPDATE {self.name} SET {', '.join(changes)} FROM {_WANTED} WHERE {self.key} = wanted.id")


def refresh_tables(engine: Engine, show_ids: Collection[str], *, as_cuebot: bool = False) -> dict[str, int]:
    """Refresh the five tables for the managed shows among ``show_ids``. Returns the rows written per table.

    ``as_cuebot``: refresh them for the shows that are not managed (any more), too, and count local procs as Cuebot
    does. A Cuebot may write the same rows meanwhile: it changes a proc and the tables in one transaction, and rows are
    summed under their locks here, so neither misses what the other did.
    """
    written = dict.fromkeys((table.name for table in _TABLES), 0)
    for table in _TABLES:
        local = table.cuebot_sums_local_procs if as_cuebot else table.sums_local_procs
        with engine.begin() as connection:
            wanted = {"shows": list(show_ids), "as_cuebot": as_cuebot, "local": local}
            differing = connection.execute(table.differing(), wanted).scalars().all()
        for start in range(0, len(differing), _ROWS_PER_TRANSACTION):
            with engine.begin() as connection:
                rows = differing[start : start + _ROWS_PER_TRANSACTION]
                written[table.name] += _write(connection, table, rows, local)
    return written


def _write(connection: Connection, table: _Table, ids: Sequence[str], local: bool) -> int:
    """Lock rows, sum their procs again and write what differs. ``local``: whether local procs count. Returns how many
    rows were written."""
    locked = {row[0]: row for row in connection.execute(table.lock(), {"ids": ids})}
    sums = connection.execute(text(table.sums(f"{table.summed_by} = ANY(:ids)")), {"ids": list(locked), "local": local})
    used = dict.fromkeys(locked, (0, 0)) | {row.id: (row.cores, row.gpus) for row in sums}
    changed = {row_id: count for row_id, count in used.items() if count != tuple(locked[row_id][1:3])}
    if changed:
        other_caps = (f"{cap} = {_OTHER_CAP.format(cap=cap)}" for cap in table.caps)
        connection.execute(_QUIET)
        connection.execute(
            table.update("int_cores = wanted.cores", "int_gpus = wanted.gpus", *other_caps), _wanted(changed)
        )
    if changed and table.caps:
        restored = (f"{cap} = wanted.{unit}" for cap, unit in zip(table.caps, ("cores", "gpus"), strict=False))
        # A subscription has a cap on cores alone: the 0 stands for the one on GPUs, which ``restored`` leaves out.
        caps = {row_id: (*locked[row_id][3:], 0) for row_id in changed}
        connection.execute(table.update(*restored), _wanted(caps))
    return len(changed)


def _wanted(amounts: Mapping[str, tuple[Any, ...]]) -> dict[str, list[Any]]:
    """The parameters of _WANTED from amounts (cores, GPUs, and what is ignored), by the key of their row."""
    cores, gpus, *_ = zip(*amounts.values(), strict=True)
    return {"ids": list(amounts), "cores": list(cores), "gpus": list(gpus)}


_TABLES = (
    _Table(
        "layer_resource",
        "pk_layer",
        owner="JOIN job USING (pk_job) JOIN show USING (pk_show)",
        summed_by="proc.pk_layer",
        cuebot_sums_local_procs=True,
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
        sums_local_procs=False,
    ),
)
