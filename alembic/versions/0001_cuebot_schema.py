"""The schema a Cuebot would have made, where there is none.

On a database made by Cuebot nothing is created but the row that says so. Elsewhere the statements of ``sql/cuebot`` run
in the order of the file names: tables, views, functions, triggers, and the rows that a farm needs before its first
show. The frame triggers that count states and write history run once a statement rather than once a row.

Left out on purpose: helpers of Cuebot's migration from Oracle that nothing calls.
"""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op
from sqlalchemy import text

from opencue_sched.store.schema import read_origin, refuse_too_old

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_SCRIPTS = sorted((Path(__file__).resolve().parent.parent / "sql" / "cuebot").glob("*.sql"))
_CREATED = re.compile(r"^CREATE (VIEW|TABLE|FUNCTION) (\w+)", re.MULTILINE)


def upgrade() -> None:
    connection = op.get_bind()
    origin = "cuebot" if refuse_too_old(connection).has_cuebot_tables else "opencue-sched"
    if origin == "opencue-sched":
        with connection.connection.cursor() as cursor:
            for script in _SCRIPTS:
                cursor.execute(script.read_text(encoding="utf-8"))
    op.execute("CREATE TABLE opencue_sched_origin (origin varchar(16) PRIMARY KEY)")
    connection.execute(text("INSERT INTO opencue_sched_origin (origin) VALUES (:origin)"), {"origin": origin})


def downgrade() -> None:
    if read_origin(op.get_bind()) == "opencue-sched":
        created = [match.groups() for script in _SCRIPTS for match in _CREATED.finditer(script.read_text("utf-8"))]
        for kind in ("VIEW", "TABLE", "FUNCTION"):
            for name in (name for of_kind, name in reversed(created) if of_kind == kind):
                op.execute(f"DROP {kind} {name}")
    op.execute("DROP TABLE opencue_sched_origin")
