"""The indexes of OpenCue's that the schema we make had not, built without blocking a live farm.

Without that of limit_record a booking read the table in spite of `enable_seqscan = off`, and a PostgreSQL with a
just-in-time compiler compiled each of these statements anew.
"""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op
from sqlalchemy import text

from opencue_sched.store.schema import read_origin

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_SCRIPT = Path(__file__).resolve().parent.parent / "sql" / "cuebot" / "85_indexes.sql"
_INDEX = re.compile(r"^CREATE INDEX (\w+) (ON .+);$", re.MULTILINE)
_VALID = text(
    "SELECT c.relname FROM pg_index i JOIN pg_class c ON c.oid = i.indexrelid"
    " WHERE i.indisvalid AND c.relnamespace = current_schema()::regnamespace"
)


def upgrade() -> None:
    connection = op.get_bind()
    if read_origin(connection) == "cuebot":
        return
    there = set(connection.execute(_VALID).scalars())
    with op.get_context().autocommit_block():
        for name, definition in _INDEX.findall(_SCRIPT.read_text(encoding="utf-8")):
            if name not in there:
                # A build that was cut short leaves an invalid index under the name.
                op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
                op.execute(f"CREATE INDEX CONCURRENTLY {name} {definition}")


def downgrade() -> None:
    """They go with their tables, in revision 0001."""
