"""Announce a layer whose start time is set anew as new work: its cluster rests until the time that it knew of.

Not where Cuebot is older than V47, whose layers have no start time.
"""

from __future__ import annotations

from alembic import op
from sqlalchemy import inspect

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def _wait_no_longer() -> None:
    """A trigger needs the table to itself: rather give up than hold up everybody behind us."""
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")


def upgrade() -> None:
    if not any(column["name"] == "ts_start_after" for column in inspect(op.get_bind()).get_columns("layer")):
        return
    _wait_no_longer()
    op.execute("""
        CREATE TRIGGER opencue_sched_work_arrived AFTER UPDATE OF ts_start_after ON layer FOR EACH ROW
        WHEN (OLD.ts_start_after IS DISTINCT FROM NEW.ts_start_after) EXECUTE FUNCTION opencue_sched_work_arrived()
    """)


def downgrade() -> None:
    _wait_no_longer()
    op.execute("DROP TRIGGER IF EXISTS opencue_sched_work_arrived ON layer")
