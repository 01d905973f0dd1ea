"""The tables that this program uses, and what its database user must be allowed to do where it does not own them.

A table joins one of the lists when a statement first touches it. docs/tasks/database-user.md has the grants.
"""

from __future__ import annotations

from sqlalchemy import Connection, text

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
