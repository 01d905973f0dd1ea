"""The tables that this program uses, and what its database user must be allowed to do where it does not own them.

A table joins READ or CHANGED when a statement first touches it; `doctor` asks for all of them. Without the few that
WRITES_OF_... have a process does not start. docs/tasks/database-user.md has the grants.
"""

from __future__ import annotations

from collections.abc import Mapping

from sqlalchemy import Connection, text

from opencue_sched.errors import StoreUnusable
from opencue_sched.store.schema import Origin

READ = (
    "config",
    "dept",
    "filter",
    "opencue_sched_origin",
    "opencue_sched_version",
    "show_alias",
    "show_service",
)
"""Tables that our processes and commands read and never change."""

READ_ON_OUR_SCHEMA = ("task_lock",)
"""Tables that are read in a schema that opencue-sched made, and not in one that Cuebot made. ``task_lock`` is asked
before finished jobs go to the history tables, and in a schema of Cuebot's it is Cuebot that moves these jobs."""

CHANGED = (
    "alloc",
    "comments",
    "deed",
    "depend",
    "facility",
    "folder",
    "folder_level",
    "folder_resource",
    "frame",
    "frame_history",
    "frame_state_display_overrides",
    "host",
    "host_local",
    "host_stat",
    "host_tag",
    "job",
    "job_env",
    "job_history",
    "job_local",
    "job_mem",
    "job_post",
    "job_resource",
    "job_stat",
    "job_usage",
    "layer",
    "layer_env",
    "layer_history",
    "layer_limit",
    "layer_mem",
    "layer_output",
    "layer_resource",
    "layer_stat",
    "layer_usage",
    "limit_host",
    "limit_record",
    "opencue_sched_blocked",
    "opencue_sched_dead_job",
    "opencue_sched_failed_run",
    "opencue_sched_fence",
    "opencue_sched_frame_memory",
    "opencue_sched_hold",
    "opencue_sched_job_event",
    "opencue_sched_locked_cores",
    "opencue_sched_quarantine",
    "opencue_sched_receiver",
    "point",
    "proc",
    "service",
    "show",
    "show_stats",
    "subscription",
)
"""Tables whose rows are locked or changed by our statements, or by OpenCue's triggers that these fire: a trigger acts
with the privileges of our user. A Cuebot before V49 has no ``limit_host``."""

CHANGES = ("SELECT", "INSERT", "UPDATE", "DELETE")
"""The privileges that are needed on each table of CHANGED."""

Writes = Mapping[str, tuple[str, ...]]
"""Privileges, each with the tables for which it is needed."""

WRITES_OF_WORKERS: Writes = {
    "INSERT": ("proc",),
    "UPDATE": ("frame", "host", "job_stat", "layer_stat"),
    "DELETE": ("opencue_sched_hold",),
}
"""The privileges without which PostgreSQL refuses every booking, whatever OpenCue's triggers do. A worker needs more
for what not every farm does (CHANGED), and is not refused for that. So it is with beats and report services."""

WRITES_OF_BEATS: Writes = {
    "INSERT": ("opencue_sched_fence",),
    "UPDATE": ("opencue_sched_fence",),
}
"""The privileges without which PostgreSQL refuses to let any beat lead."""

WRITES_OF_REPORT_SERVICES: Writes = {
    "UPDATE": (
        "frame",
        "host",
        "host_stat",
        "job_mem",
        "job_stat",
        "job_usage",
        "layer",
        "layer_mem",
        "layer_stat",
        "layer_usage",
        "proc",
        "show",
        "show_stats",
    ),
    "DELETE": ("proc",),
}
"""The privileges without which PostgreSQL refuses every status of a host, or every completion of a frame."""

# The privileges that our user has for no column of a table that is there, with the user and the table's schema as SQL
# writes them. DELETE is granted for whole tables only.
_REFUSED = text(
    """
    SELECT wanted.privilege, wanted.name, quote_ident(current_user) AS "user",
           CAST(CAST(there.relnamespace AS regnamespace) AS text) AS schema
      FROM unnest(CAST(:names AS text[]), CAST(:privileges AS text[])) AS wanted(name, privilege)
      JOIN pg_class there ON there.oid = to_regclass(wanted.name)
     WHERE NOT CASE wanted.privilege WHEN 'DELETE' THEN has_table_privilege(there.oid, 'DELETE')
                                     ELSE has_any_column_privilege(there.oid, wanted.privilege) END
     ORDER BY wanted.name, wanted.privilege
    """
)
# The privileges that our user lacks. A table that is not there is not among them: has_table_privilege() answers NULL.
_MISSING = text(
    """
    SELECT wanted.privilege, wanted.name
      FROM unnest(CAST(:names AS text[]), CAST(:privileges AS text[])) AS wanted(name, privilege)
     WHERE NOT has_table_privilege(to_regclass(wanted.name), wanted.privilege)
     ORDER BY wanted.name, wanted.privilege
    """
)
# Which of these tables are not there.
_ABSENT = text("SELECT name FROM unnest(CAST(:names AS text[])) AS name WHERE to_regclass(name) IS NULL ORDER BY name")


def missing_tables(connection: Connection) -> list[str]:
    """Our own tables that are not there. In a schema of this program's revision they were dropped."""
    ours = [name for name in (*READ, *CHANGED) if name.startswith("opencue_sched_")]
    return list(connection.execute(_ABSENT, {"names": ours}).scalars())


def missing_privileges(connection: Connection, origin: Origin) -> list[str]:
    """Privileges that our user lacks, such as ``DELETE on host_tag``. ``origin``: who made the schema."""
    read = READ if origin == "cuebot" else (*READ, *READ_ON_OUR_SCHEMA)
    wanted = [(name, "SELECT") for name in read] + [(name, privilege) for name in CHANGED for privilege in CHANGES]
    names, privileges = zip(*wanted, strict=True)
    rows = connection.execute(_MISSING, {"names": list(names), "privileges": list(privileges)})
    return [f"{row.privilege} on {row.name}" for row in rows]


def check_privileges(connection: Connection, writes: Writes) -> None:
    """Refuse a user that has one of these privileges for no column of its table, by StoreUnusable, which says who lacks
    what, and the statement that grants it.

    Column by column a user may have less than it needs: that is left to `missing_privileges`, so that nobody is refused
    who could do the work.
    """
    wanted = [(name, privilege) for privilege, names in writes.items() for name in names]
    names, privileges = zip(*wanted, strict=True)
    refused = connection.execute(_REFUSED, {"names": list(names), "privileges": list(privileges)}).all()
    if not refused:
        return
    user, schemas = refused[0].user, ", ".join(sorted({row.schema for row in refused}))
    raise StoreUnusable(
        f"this database refuses what user {user} must be allowed: "
        f"{', '.join(f'{row.privilege} on {row.name}' for row in refused)}; as the owner of the tables, GRANT "
        f"{', '.join(CHANGES)} ON ALL TABLES IN SCHEMA {schemas} TO {user} (docs/tasks/database-user.md has it all)"
    )
