"""Folders of shows (groups, in Cuebot's words), their caps, and the jobs in them.

A folder has two sets of amounts. Those of ``folder_resource`` cap the folder itself, and are enforced. Those of
``folder`` (``int_job_...``) are given to each job that moves there. -1 is no cap in the first, "leave the job's own" in
the second. Cores of both are centicores; what is used is in whole cores, as caps count it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

from opencue_sched.store.pending import USED
from opencue_sched.store.shows import INSERT_POINT

_WANTED = "(NOT CAST(:capped AS boolean) OR caps.int_max_cores > 0 OR caps.int_max_gpus > 0)"
# Each folder, or each that has a cap, its caps, what it gives to its jobs, and what its jobs wait for and use now.
_FOLDERS = text(
    f"""
    SELECT folder.pk_folder AS id, folder.str_name AS name, show.str_name AS show, show.b_active AS show_active,
           parent.str_name AS parent, dept.str_name AS dept, folder.pk_show AS show_id, folder.pk_dept AS dept_id,
           folder.pk_parent_folder IS NULL AS is_default, folder.int_job_min_cores AS job_min_cores,
           folder.int_job_max_cores AS job_max_cores, folder.int_job_min_gpus AS job_min_gpus,
           folder.int_job_max_gpus AS job_max_gpus,
           caps.int_min_cores AS min_centicores, caps.int_max_cores AS max_centicores,
           caps.int_min_gpus AS min_gpus, caps.int_max_gpus AS max_gpus,
           coalesce(work.jobs, 0) AS jobs, CAST(coalesce(work.waiting, 0) AS bigint) AS waiting,
           coalesce(used.cores, 0) AS used_cores, coalesce(used.gpus, 0) AS used_gpus,
           coalesce(used.procs, 0) AS running
      FROM folder JOIN show USING (pk_show) JOIN dept USING (pk_dept) JOIN folder_resource caps USING (pk_folder)
      LEFT JOIN folder_level level USING (pk_folder)
      LEFT JOIN (SELECT pk_folder, count(*) AS jobs, sum(int_waiting_count) AS waiting
                   FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
                  WHERE str_state = 'PENDING' GROUP BY pk_folder) work USING (pk_folder)
      LEFT JOIN (SELECT job.pk_folder, count(*) AS procs, {USED}
                   FROM proc p JOIN job USING (pk_job) JOIN folder_resource caps USING (pk_folder)
                  WHERE {_WANTED} GROUP BY job.pk_folder) used USING (pk_folder)
      LEFT JOIN folder parent ON parent.pk_folder = folder.pk_parent_folder
     WHERE (CAST(:show AS varchar) IS NULL OR folder.pk_show = :show) AND {_WANTED}
     ORDER BY show.str_name, level.int_level, folder.str_name, folder.pk_folder
    """  # noqa: S608 - only our own constant
)
# As Cuebot moves jobs: a job takes the folder's department, and the amounts that the folder gives to its jobs. Triggers
# of the schema move what the job uses to ``folder_resource`` of the new folder and to ``point`` of the new department.
_MOVE_JOBS = (
    text(
        """
        WITH locked AS (
            SELECT pk_job FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[])) ORDER BY pk_job FOR NO KEY UPDATE)
        UPDATE job SET pk_folder = folder.pk_folder, pk_dept = folder.pk_dept
          FROM locked, folder WHERE job.pk_job = locked.pk_job AND folder.pk_folder = :folder
        """
    ),
    text(
        """
        UPDATE job_history SET pk_dept = folder.pk_dept
          FROM folder WHERE folder.pk_folder = :folder AND pk_job = ANY(CAST(:jobs AS varchar[]))
        """
    ),
    text(
        """
        UPDATE job_resource
           SET int_priority = coalesce(nullif(folder.int_job_priority, -1), job_resource.int_priority),
               int_min_cores = coalesce(nullif(folder.int_job_min_cores, -1), job_resource.int_min_cores),
               int_max_cores = coalesce(nullif(folder.int_job_max_cores, -1), job_resource.int_max_cores),
               int_min_gpus = coalesce(nullif(folder.int_job_min_gpus, -1), job_resource.int_min_gpus),
               int_max_gpus = coalesce(nullif(folder.int_job_max_gpus, -1), job_resource.int_max_gpus)
          FROM folder WHERE folder.pk_folder = :folder AND pk_job = ANY(CAST(:jobs AS varchar[]))
        """
    ),
)


def list_folders(connection: Connection, show_id: str | None = None, *, capped: bool = False) -> Sequence[Row[Any]]:
    """The folders of all shows, or of one, each show's root folder (the default) first. With ``capped`` those alone
    that have a cap of cores or GPUs: what runs in no such folder is not read.

    ``min_centicores`` to ``max_gpus`` are a folder's caps, ``job_min_cores`` (centicores) to ``job_max_gpus`` what it
    gives to its jobs, ``used_cores`` and ``used_gpus`` what its procs take now.
    """
    return connection.execute(_FOLDERS, {"show": show_id, "capped": capped}).all()


def move_jobs(connection: Connection, job_ids: Collection[str], folder: Row[Any]) -> None:
    """Move jobs into ``folder``, a row of ``list_folders`` of the jobs' own show."""
    # First of all: the triggers would find no row of ``point`` to count the jobs' use in, and it would be lost.
    connection.execute(INSERT_POINT, {"dept": folder.dept_id, "show": folder.show_id})
    for statement in _MOVE_JOBS:
        connection.execute(statement, {"folder": folder.id, "jobs": sorted(job_ids)})
