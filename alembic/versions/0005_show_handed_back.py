"""Say that a show went back to Cuebot the moment it does, whoever does it: its tables are to be right before the next
booking there."""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def _wait_no_longer() -> None:
    """A trigger needs the table to itself: rather give up than hold up everybody behind us."""
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")


def upgrade() -> None:
    _wait_no_longer()
    op.execute("""
        CREATE FUNCTION opencue_sched_show_handed_back() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM opencue_sched_notify('opencue_sched_handed_back', 'shows', ARRAY[NEW.pk_show::text]);
            RETURN NULL;
        END
        $$
    """)
    op.execute("""
        CREATE TRIGGER opencue_sched_show_handed_back AFTER UPDATE ON show FOR EACH ROW
        WHEN (OLD.b_scheduler_managed AND NOT NEW.b_scheduler_managed)
        EXECUTE FUNCTION opencue_sched_show_handed_back()
    """)


def downgrade() -> None:
    _wait_no_longer()
    op.execute("DROP TRIGGER opencue_sched_show_handed_back ON show")
    op.execute("DROP FUNCTION opencue_sched_show_handed_back()")
