"""Only this scheduler's sessions assign frames of managed shows.

A Cuebot books past the flag of a show: its redirects and retries have a path of their own, and the list it books from
is seconds old. By its columns, which are as old as the last recompute, it would fill a cap a second time.
"""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

# The name that every engine of ours has (clients/postgres.py), the older ones' too: they book while a fleet is
# upgraded.
_STRANGER = "NOT NEW.b_local AND current_setting('application_name') NOT LIKE 'opencue-sched%'"


def _wait_no_longer() -> None:
    """A trigger needs the table to itself: rather give up than hold up everybody behind us."""
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")


def upgrade() -> None:
    _wait_no_longer()
    # After an error of integrity Cuebot leaves the frame alone. After any other it sets the frame WAITING once more,
    # though we may have booked it meanwhile.
    op.execute("""
        CREATE FUNCTION opencue_sched_guard_proc() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            IF EXISTS (SELECT FROM job JOIN show USING (pk_show) WHERE pk_job = NEW.pk_job AND b_scheduler_managed) THEN
                RAISE check_violation USING MESSAGE = format(
                    'the show of job %s is managed by opencue-sched, which alone books its frames', NEW.pk_job);
            END IF;
            RETURN NEW;
        END
        $$
    """)
    op.execute(f"""
        CREATE TRIGGER opencue_sched_guard_insert BEFORE INSERT ON proc FOR EACH ROW
        WHEN ({_STRANGER}) EXECUTE FUNCTION opencue_sched_guard_proc()
    """)
    op.execute(f"""
        CREATE TRIGGER opencue_sched_guard_update BEFORE UPDATE OF pk_frame, pk_job ON proc FOR EACH ROW
        WHEN (NEW.pk_frame IS NOT NULL AND (NEW.pk_frame, NEW.pk_job) IS DISTINCT FROM (OLD.pk_frame, OLD.pk_job)
              AND {_STRANGER}) EXECUTE FUNCTION opencue_sched_guard_proc()
    """)


def downgrade() -> None:
    _wait_no_longer()
    op.execute("DROP TRIGGER opencue_sched_guard_update ON proc")
    op.execute("DROP TRIGGER opencue_sched_guard_insert ON proc")
    op.execute("DROP FUNCTION opencue_sched_guard_proc()")
