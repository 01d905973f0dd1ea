"""Room on the pages of the rows that every status report changes in place, in the schema that we make.

No index covers the columns that change, so an update stays on its page as long as there is space. Without any, each
report wrote into the seven indexes of ``proc`` and the ten of ``frame``, which was half of what it cost. Pages that are
there already get room as their rows are written anew.
"""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS, read_origin

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None

_FILL_PERCENT = {"frame": 70, "proc": 50, "host_stat": 50}
"""Most frames of a table wait, or are over, and are not reported."""


def _each(setting: str) -> None:
    if read_origin(op.get_bind()) == "cuebot":
        return
    # Nobody who books or reports waits for this lock.
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")
    for table, percent in _FILL_PERCENT.items():
        op.execute(f"ALTER TABLE {table} {setting.format(percent=percent)}")


def upgrade() -> None:
    _each("SET (fillfactor = {percent})")


def downgrade() -> None:
    _each("RESET (fillfactor)")
