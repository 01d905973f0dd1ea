"""Two tables for what is promised to wide frames: hosts that drain for them, and how long they have been blocked.

No foreign keys, as with opencue_sched_quarantine. One would put triggers on Cuebot's tables, need each of them to
itself for a moment of the migration, and make every delete of a host, layer or job look here first. A row whose host,
layer or job is gone promises nothing: whoever reads holds joins the three, and the duty deletes it.
"""

from __future__ import annotations

from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    # What one frame needs of the host: whole cores, KB, GPUs. free_at: when so much is expected idle, if anybody knows.
    op.execute("""
        CREATE TABLE opencue_sched_hold (
            pk_host varchar(36) PRIMARY KEY,
            pk_layer varchar(36) NOT NULL,
            pk_job varchar(36) NOT NULL,
            cores integer NOT NULL,
            memory_kb bigint NOT NULL,
            gpus integer NOT NULL,
            granted_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            until timestamptz NOT NULL,
            free_at timestamptz
        )
    """)
    # waiting: the frames that waited when the row was last written; fewer since then means that some were placed.
    op.execute("""
        CREATE TABLE opencue_sched_blocked (
            pk_layer varchar(36) PRIMARY KEY,
            seconds double precision NOT NULL,
            waiting integer NOT NULL,
            seen timestamptz NOT NULL
        )
    """)


def downgrade() -> None:
    op.execute("DROP TABLE IF EXISTS opencue_sched_hold, opencue_sched_blocked")
