"""Name the shows, jobs and layers whose waiting work changed, so that workers that keep it in memory read just these
again."""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_SQL = Path(__file__).resolve().parent.parent / "sql" / "own"
_BEFORE = re.compile(r"^CREATE (FUNCTION opencue_sched_work_arrived.*?^\$\$;)$", re.MULTILINE | re.DOTALL)


def _run(sql: str) -> None:
    with op.get_bind().connection.cursor() as cursor:
        # A trigger needs the table to itself: rather give up than hold up everybody behind us.
        cursor.execute("SELECT set_config('lock_timeout', %s, true)", [f"{TABLE_LOCK_SECONDS * 1000:.0f}ms"])
        cursor.execute(sql)


def upgrade() -> None:
    _run((_SQL / "backlog.sql").read_text(encoding="utf-8"))


def downgrade() -> None:
    (before,) = _BEFORE.findall((_SQL / "objects.sql").read_text(encoding="utf-8"))
    _run(f"CREATE OR REPLACE {before} DROP FUNCTION opencue_sched_backlog_changed() CASCADE")
