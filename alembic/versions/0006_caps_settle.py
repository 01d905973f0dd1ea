"""Let a cap change only between commits of bookings: none is committed above it after the change.

Whoever books shares a lock on each capped vertex from before it reads the caps until its COMMIT; whoever changes a cap
takes that lock alone. Bookings do not wait for it: a vertex whose cap is being changed takes none. Locks on the rows
will not do, for Cuebot's counters are in them too.
"""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_SQL = Path(__file__).resolve().parent.parent / "sql" / "own"
_BEFORE = re.compile(r"^CREATE (FUNCTION opencue_sched_caps_changed.*?^\$\$;)$", re.MULTILINE | re.DOTALL)


def _run(sql: str) -> None:
    with op.get_bind().connection.cursor() as cursor:
        cursor.execute(sql)


def upgrade() -> None:
    _run((_SQL / "caps_settle.sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    (before,) = _BEFORE.findall((_SQL / "objects.sql").read_text(encoding="utf-8"))
    _run(f"CREATE OR REPLACE {before}")
    _run("DROP FUNCTION opencue_sched_settle_caps(text[])")
