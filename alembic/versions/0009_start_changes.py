"""Announce a layer whose start time is set anew as new work: its cluster rests until the time that it knew of.

Where Cuebot is older than V47 layers have no start time; once they have, any later migration adds the trigger.
"""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS, announce_start_times

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    announce_start_times(op.get_bind())


def downgrade() -> None:
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")
    op.execute("DROP TRIGGER IF EXISTS opencue_sched_work_arrived ON layer")
