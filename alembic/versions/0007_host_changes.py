"""Announce hosts whose lock, state or hardware changed, as caps are: the clusters that can use them need not wait for
their next pass. They are told on the channel of releases, without procs."""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

# Bookings and host reports update these rows all the time: for them the condition is false, and nothing is called.
_CHANGED = {
    "host": "(OLD.str_lock_state, OLD.int_cores, OLD.int_mem, OLD.int_gpus, OLD.int_gpu_mem) IS DISTINCT FROM"
    " (NEW.str_lock_state, NEW.int_cores, NEW.int_mem, NEW.int_gpus, NEW.int_gpu_mem)",
    "host_stat": "OLD.str_state IS DISTINCT FROM NEW.str_state",
}


def _wait_no_longer() -> None:
    """A trigger needs the table to itself: rather give up than hold up everybody behind us."""
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")


def upgrade() -> None:
    _wait_no_longer()
    op.execute("""
        CREATE FUNCTION opencue_sched_host_changed() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            PERFORM opencue_sched_notify('opencue_sched_release', 'hosts', ARRAY[NEW.pk_host::text]);
            RETURN NULL;
        END
        $$
    """)
    for table, changed in _CHANGED.items():
        op.execute(
            f"CREATE TRIGGER opencue_sched_host_changed AFTER UPDATE ON {table} FOR EACH ROW"
            f" WHEN ({changed}) EXECUTE FUNCTION opencue_sched_host_changed()"
        )


def downgrade() -> None:
    _wait_no_longer()
    op.execute("DROP FUNCTION opencue_sched_host_changed() CASCADE")
