"""The history of runs is written once for all frames of a statement, and reports of what runs have none looked for, in
the schema that we make.

Nine tenths of the updates of ``frame`` are reports, of which both AFTER triggers aggregated each row before and after;
and the end of a frame cost as much in a loop over its history as in all else that stopping it writes.
"""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op

from opencue_sched.store.schema import read_origin

revision = "0025"
down_revision = "0024"
branch_labels = None
depends_on = None

_SCRIPT = Path(__file__).resolve().parent.parent / "sql" / "cuebot" / "72_frame_triggers.sql"
_FUNCTIONS = re.compile(
    r"^CREATE (FUNCTION trigger__(?:update_frame_status_counts|frame_history_open)\(\).*?^\$\$;)",
    re.MULTILINE | re.DOTALL,
)


def upgrade() -> None:
    connection = op.get_bind()
    if read_origin(connection) == "cuebot":
        return
    for function in _FUNCTIONS.findall(_SCRIPT.read_text(encoding="utf-8")):
        # Past SQLAlchemy, which would take colons for parameters.
        connection.connection.cursor().execute(f"CREATE OR REPLACE {function}")


def downgrade() -> None:
    """They write the same rows, and go with their table, in revision 0001."""
