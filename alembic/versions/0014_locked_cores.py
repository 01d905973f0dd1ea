"""A table for the cores that are locked on the RQDs themselves: a host may be locked in part, which OpenCue's tables
have no place for.

No foreign key, for the reasons of revision 0010: a row whose host is gone means nothing.
"""

from __future__ import annotations

from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE opencue_sched_locked_cores (
            pk_host varchar(36) PRIMARY KEY,
            centicores integer NOT NULL
        )
    """)


def downgrade() -> None:
    op.execute("DROP TABLE IF EXISTS opencue_sched_locked_cores")
