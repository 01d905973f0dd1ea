"""Finished jobs move to the history tables, in the schema that we make, a day after this upgrade or later.

Where OpenCue notes its own transfers the moment of the upgrade is noted. Jobs of the history are found by when they
ended, by an index that is built without blocking a live farm.
"""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import read_origin

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None

_INDEX = "opencue_sched_job_history_stopped"


def upgrade() -> None:
    if read_origin(op.get_bind()) == "cuebot":
        return
    op.execute("UPDATE task_lock SET ts_lastrun = localtimestamp WHERE str_name = 'LOCK_HISTORICAL_TRANSFER'")
    with op.get_context().autocommit_block():
        # A build that was cut short leaves an invalid index under the name.
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_INDEX}")
        op.execute(f"CREATE INDEX CONCURRENTLY {_INDEX} ON job_history (int_ts_stopped)")


def downgrade() -> None:
    """It goes with its table, in revision 0001."""
