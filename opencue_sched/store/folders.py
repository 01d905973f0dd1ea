"""Folders of shows (groups, in Cuebot's words), their caps, and the jobs in them.

The caps that are enforced are those of ``folder_resource``; a trigger of ours tells the workers when they change. Cores
are centicores; -1 is no cap.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, Row, text

CAPS = ("int_min_cores", "int_max_cores", "int_min_gpus", "int_max_gpus")

_FOLDERS = text(
    """
    SELECT folder.pk_folder AS id, folder.str_name AS name, show.str_name AS show, parent.str_name AS parent,
           dept.str_name AS dept, folder.pk_show AS show_id, folder.pk_dept AS dept_id,
           caps.int_min_cores AS min_centicores, caps.int_max_cores AS max_centicores,
           caps.int_min_gpus AS min_gpus, caps.int_max_gpus AS max_gpus,
           coalesce(work.jobs, 0) AS jobs, CAST(coalesce(work.waiting, 0) AS bigint) AS waiting,
           CAST(coalesce(used.cores, 0) AS bigint) AS used_centicores, coalesce(used.gpus, 0) AS used_gpus,
           coalesce(used.procs, 0) AS running
      FROM folder
      JOIN show ON show.pk_show = folder.pk_show
      JOIN dept ON dept.pk_dept = folder.pk_dept
      JOIN folder_resource caps ON caps.pk_folder = folder.pk_folder
      LEFT JOIN folder_level level ON level.pk_folder = folder.pk_folder
      LEFT JOIN folder parent ON parent.pk_folder = folder.pk_parent_folder
      LEFT JOIN (SELECT pk_folder, count(*) AS jobs, sum(int_waiting_count) AS waiting
                   FROM job JOIN job_stat ON job_stat.pk_job = job.pk_job
                  WHERE str_state = 'PENDING' GROUP BY pk_folder) work ON work.pk_folder = folder.pk_folder
      LEFT JOIN (SELECT job.pk_folder, sum(int_cores_reserved) AS cores, sum(int_gpus_reserved) AS gpus,
                        count(*) AS procs
                   FROM proc JOIN job ON job.pk_job = proc.pk_job GROUP BY job.pk_folder) used
             ON used.pk_folder = folder.pk_folder
     WHERE (CAST(:show AS varchar) IS NULL OR folder.pk_show = :show)
       AND (NOT CAST(:capped AS boolean)
            OR (caps.int_max_cores > 0 OR caps.int_max_gpus > 0) AND (show.b_active OR used.procs > 0))
     ORDER BY show.str_name, level.int_level, folder.str_name, folder.pk_folder
    """
)
# The schema's triggers make the rows of folder_level and folder_resource.
_INSERT = text(
    """
    INSERT INTO folder (pk_folder, pk_parent_folder, pk_show, pk_dept, str_name)
    VALUES (:folder, :parent, :show, :dept, :name) ON CONFLICT (pk_parent_folder, str_name) DO NOTHING
    """
)
_SET_CAPS = text(
    """
    UPDATE folder_resource
       SET int_min_cores = coalesce(:int_min_cores, int_min_cores),
           int_max_cores = coalesce(:int_max_cores, int_max_cores),
           int_min_gpus = coalesce(:int_min_gpus, int_min_gpus), int_max_gpus = coalesce(:int_max_gpus, int_max_gpus)
     WHERE pk_folder = :folder
    """
)
# As Cuebot moves jobs: they take the department of the folder, and what it says about its jobs (-1: nothing). Triggers
# of the schema move what they use to the rows of their new folder and department, so the latter must be there.
_MOVE = (
    text(
        """
        INSERT INTO point (pk_point, pk_dept, pk_show)
        SELECT CAST(gen_random_uuid() AS varchar), pk_dept, pk_show FROM folder WHERE pk_folder = :folder
        ON CONFLICT DO NOTHING
        """
    ),
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
_SHOWS_OF = text("SELECT DISTINCT pk_show FROM job WHERE pk_job = ANY(CAST(:jobs AS varchar[]))")


def list_folders(connection: Connection, show_id: str | None = None, *, capped: bool = False) -> Sequence[Row[Any]]:
    """The folders of all shows, or of one, the root first, with their caps and live use; ``capped``: only those of
    active shows, or in use, that have a cap."""
    return connection.execute(_FOLDERS, {"show": show_id, "capped": capped}).all()


def insert_folder(connection: Connection, name: str, parent: Row[Any]) -> str | None:
    """A new folder below another one, with its department; its id, or None when there is one of that name."""
    row = {"folder": str(uuid.uuid4()), "name": name, "parent": parent.id}
    made = connection.execute(_INSERT, row | {"show": parent.show_id, "dept": parent.dept_id})
    return row["folder"] if made.rowcount else None


def set_caps(connection: Connection, folder_id: str, caps: Mapping[str, int | None]) -> None:
    """Set those of the CAPS that are not None."""
    connection.execute(_SET_CAPS, {**dict.fromkeys(CAPS), **caps, "folder": folder_id})


def shows_of(connection: Connection, job_ids: Collection[str]) -> list[str]:
    """Ids of the shows of these jobs."""
    return list(connection.execute(_SHOWS_OF, {"jobs": list(job_ids)}).scalars())


def move_jobs(connection: Connection, job_ids: Collection[str], folder_id: str) -> None:
    """Put jobs of the folder's show into it."""
    for statement in _MOVE:
        connection.execute(statement, {"folder": folder_id, "jobs": sorted(job_ids)})
