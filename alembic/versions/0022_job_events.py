"""What a farm's own receiver is to be told: that a job has ended, and that its first frame has died.

``opencue_sched_job_event`` has what is still to be sent; a row goes once it was. ``opencue_sched_dead_job`` names the
jobs of whose dead frames was told since they were retried last. ``opencue_sched_receiver`` says for which facility
(empty: for all) somebody is to be told: where there is none, no event is written.

No foreign key, for the reasons of revision 0010. On a Cuebot's database the tables stay empty: a Cuebot has mails.
"""

from __future__ import annotations

from alembic import op

revision = "0022"
down_revision = "0021"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.execute("""
        CREATE TABLE opencue_sched_job_event (
            id varchar(36) PRIMARY KEY DEFAULT CAST(gen_random_uuid() AS varchar),
            event varchar(32) NOT NULL,
            facility varchar(255) NOT NULL,
            body json NOT NULL,
            made_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            due_at timestamptz NOT NULL DEFAULT clock_timestamp(),
            tries integer NOT NULL DEFAULT 0,
            last_error varchar(500)
        )
    """)
    op.execute("CREATE INDEX opencue_sched_job_event_due ON opencue_sched_job_event ((tries > 0), due_at)")
    op.execute("CREATE INDEX opencue_sched_job_event_made ON opencue_sched_job_event (made_at)")
    op.execute("CREATE TABLE opencue_sched_dead_job (pk_job varchar(36) PRIMARY KEY)")
    op.execute("""
        CREATE TABLE opencue_sched_receiver (
            facility varchar(255) PRIMARY KEY,
            seen_at timestamptz NOT NULL
        )
    """)


def downgrade() -> None:
    op.execute("DROP TABLE IF EXISTS opencue_sched_job_event, opencue_sched_dead_job, opencue_sched_receiver")
