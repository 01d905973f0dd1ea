"""The history of a frame that ends is looked up by the frame, in the schema that we make.

A session that had planned it while little was known of the table read the history of every running frame for each that
ended.
"""

from __future__ import annotations

import re
from pathlib import Path

from alembic import op

from opencue_sched.store.schema import read_origin

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None

_SCRIPT = Path(__file__).resolve().parent.parent / "sql" / "cuebot" / "72_frame_triggers.sql"
_FUNCTION = re.compile(r"^CREATE (FUNCTION trigger__frame_history_open\(\).*?^\$\$;)", re.MULTILINE | re.DOTALL)


def upgrade() -> None:
    connection = op.get_bind()
    if read_origin(connection) == "cuebot":
        return
    (function,) = _FUNCTION.findall(_SCRIPT.read_text(encoding="utf-8"))
    # Past SQLAlchemy, which would take colons for parameters.
    connection.connection.cursor().execute(f"CREATE OR REPLACE {function}")


def downgrade() -> None:
    """It writes the same rows, and goes with its table, in revision 0001."""
