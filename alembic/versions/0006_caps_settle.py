"""Let a cap change only between commits of bookings: none is committed above it after the change.

Whoever books shares a lock on each capped vertex from before it reads the caps until its COMMIT; whoever changes a cap
takes that lock alone. Bookings do not wait for it: a vertex whose cap is being changed takes none. Locks on the rows
will not do, for Cuebot's counters are in them too.
"""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

# Table: how a row names its vertex (as notifications do), and the columns of its caps.
_CAPS = {
    "subscription": ("'sub:' || {row}.pk_show || ':' || {row}.pk_alloc", ("int_burst",)),
    "folder_resource": ("'folder:' || {row}.pk_folder", ("int_max_cores", "int_max_gpus")),
    "job_resource": ("'job:' || {row}.pk_job", ("int_max_cores", "int_max_gpus")),
    "limit_record": ("'limit:' || {row}.pk_limit_record", ("int_max_value",)),
}


def _wait_no_longer() -> None:
    """A trigger needs the table to itself: rather give up than hold up everybody behind us."""
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")


def _create(table: str, vertex: str, columns: tuple[str, ...]) -> None:
    changed = " OR ".join(f"OLD.{column} IS DISTINCT FROM NEW.{column}" for column in columns)
    name = f"opencue_sched_settle_{table}"
    op.execute(f"""
        CREATE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql AS $$
        BEGIN
            -- A transaction that only lifts a cap and puts it back leaves nothing to wait for.
            IF current_setting('opencue_sched.lifts_caps', true) IS DISTINCT FROM 'on' THEN
                PERFORM pg_advisory_xact_lock(hashtextextended({vertex.format(row="OLD")}, 0));
            END IF;
            RETURN NULL;
        END
        $$
    """)
    op.execute(f"""
        CREATE TRIGGER opencue_sched_settle_update AFTER UPDATE ON {table} FOR EACH ROW
        WHEN ({changed}) EXECUTE FUNCTION {name}()
    """)


def upgrade() -> None:
    _wait_no_longer()
    for table, (vertex, columns) in _CAPS.items():
        _create(table, vertex, columns)
    # Without a subscription nothing may be booked; what else is deleted was a cap that is gone.
    op.execute("""
        CREATE TRIGGER opencue_sched_settle_delete AFTER DELETE ON subscription FOR EACH ROW
        EXECUTE FUNCTION opencue_sched_settle_subscription()
    """)


def downgrade() -> None:
    _wait_no_longer()
    op.execute("DROP TRIGGER opencue_sched_settle_delete ON subscription")
    for table in _CAPS:
        op.execute(f"DROP TRIGGER opencue_sched_settle_update ON {table}")
        op.execute(f"DROP FUNCTION opencue_sched_settle_{table}()")
