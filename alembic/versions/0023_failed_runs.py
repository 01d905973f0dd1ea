"""A table for the hosts that frames failed on lately: they are given to others while there are such.

No foreign key: Cuebot must be able to delete jobs. Rows go after a day.
"""

from __future__ import annotations

from alembic import op

revision = "0023"
down_revision = "0022"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE opencue_sched_failed_run (
            pk_frame varchar(36) NOT NULL,
            str_host varchar(256) NOT NULL,
            pk_layer varchar(36) NOT NULL,
            pk_job varchar(36) NOT NULL,
            int_exit_status bigint NOT NULL,
            ts timestamptz NOT NULL DEFAULT now(),
            PRIMARY KEY (pk_frame, str_host)
        )
    """)
    op.execute("CREATE INDEX opencue_sched_failed_run_ts ON opencue_sched_failed_run (ts)")
    op.execute("CREATE INDEX opencue_sched_failed_run_layer ON opencue_sched_failed_run (pk_layer)")


def downgrade() -> None:
    op.execute("DROP TABLE IF EXISTS opencue_sched_failed_run")
