"""What this scheduler adds to any OpenCue database: notifications, and two tables of its own.

Every name begins with ``opencue_sched_``. Nothing of Cuebot's is changed: triggers are added beside its own, and they
only notify. What an operator had us add to two of Cuebot's functions goes with our objects.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS
from opencue_sched.store.set_based_frames import switch_off

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_SQL = Path(__file__).resolve().parent.parent / "sql" / "own"


def _run(name: str) -> None:
    with op.get_bind().connection.cursor() as cursor:
        # A trigger needs the table to itself for an instant. Waiting for it behind a long transaction would stop
        # everybody behind us: rather give up and say so.
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{TABLE_LOCK_SECONDS * 1000:.0f}ms"])
        cursor.execute((_SQL / name).read_text(encoding="utf-8"))


def upgrade() -> None:
    _run("objects.sql")


def downgrade() -> None:
    switch_off(op.get_bind())
    _run("objects_drop.sql")
