"""Announce a host that gets a tag, a new host too, as one that changed: work may wait for just that tag, whose cluster
nobody has made yet."""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def _wait_no_longer() -> None:
    """A trigger needs the table to itself: rather give up than hold up everybody behind us."""
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")


def upgrade() -> None:
    _wait_no_longer()
    for event, changed in (("INSERT", ""), ("UPDATE", "WHEN (OLD.* IS DISTINCT FROM NEW.*)")):
        op.execute(
            f"CREATE TRIGGER opencue_sched_host_tag_{event.lower()} AFTER {event} ON host_tag FOR EACH ROW {changed}"
            " EXECUTE FUNCTION opencue_sched_host_changed()"
        )


def downgrade() -> None:
    _wait_no_longer()
    op.execute("DROP TRIGGER opencue_sched_host_tag_insert ON host_tag")
    op.execute("DROP TRIGGER opencue_sched_host_tag_update ON host_tag")
