"""The memory that a frame asks for by itself, after it needed more than its layer asks for.

No foreign key: Cuebot must be able to delete jobs. The rows of a job go when the job finishes.
"""

from __future__ import annotations

from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE opencue_sched_frame_memory (
            pk_frame varchar(36) PRIMARY KEY,
            pk_layer varchar(36) NOT NULL,
            memory_kb bigint NOT NULL
        )
    """)
    op.execute("CREATE INDEX opencue_sched_frame_memory_layer ON opencue_sched_frame_memory (pk_layer)")


def downgrade() -> None:
    op.execute("DROP TABLE IF EXISTS opencue_sched_frame_memory")
