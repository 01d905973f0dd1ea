"""Say that a show has work the moment it may be booked: handed over, enabled or unpaused, by whoever does it."""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_BOOKABLE = (
    "{0}.b_active AND {0}.b_scheduler_managed AND {0}.b_booking_enabled AND {0}.b_dispatch_enabled AND NOT {0}.b_paused"
)


def _wait_no_longer() -> None:
    """A trigger needs the table to itself: rather give up than hold up everybody behind us."""
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")


def upgrade() -> None:
    _wait_no_longer()
    op.execute("""
        CREATE FUNCTION opencue_sched_show_opened() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM opencue_sched_notify('opencue_sched_work', 'shows', ARRAY[NEW.pk_show::text]);
            RETURN NULL;
        END
        $$
    """)
    op.execute(f"""
        CREATE TRIGGER opencue_sched_show_opened AFTER UPDATE ON show FOR EACH ROW
        WHEN (({_BOOKABLE.format("NEW")}) AND NOT ({_BOOKABLE.format("OLD")}))
        EXECUTE FUNCTION opencue_sched_show_opened()
    """)


def downgrade() -> None:
    _wait_no_longer()
    op.execute("DROP TRIGGER opencue_sched_show_opened ON show")
    op.execute("DROP FUNCTION opencue_sched_show_opened()")
