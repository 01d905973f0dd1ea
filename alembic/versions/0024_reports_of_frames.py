"""A report, the enforcement and the time to live of a limit of frames are announced, as those of one of machines are.

They decide how many frames may run under it, so they change between commits (0006), and are read at once. A soft value
is one of machines.
"""

from __future__ import annotations

from pathlib import Path

from alembic import op

from opencue_sched.store.schema import TABLE_LOCK_SECONDS

# ruff: noqa: S608 - the statements are put together from constants of this module only

revision = "0024"
down_revision = "0023"
branch_labels = None
depends_on = None

_SQL = Path(__file__).resolve().parent.parent / "sql" / "own"
_OF_MAXIMA = (
    "SELECT pk_limit_record, int_max_value FROM after\n"
    "                  EXCEPT SELECT pk_limit_record, int_max_value FROM before"
)
# Columns are found, not named: a Cuebot before V49 has not all of them, and may get them any day.
_UNREAD = "{str_name, str_report_source, int_exit_status, int_delay_minutes, b_auto_tag}"


def _replace_function(unread_of_frames: str) -> None:
    """Make the function of 0006 tell of all that decides how a limit counts, but for these columns of one of frames."""

    def read(row: str) -> str:
        return (
            f"SELECT pk_limit_record, to_jsonb({row}) - CAST('{_UNREAD}' AS text[]) - CASE\n"
            f"                  WHEN to_jsonb({row}) ->> 'str_type' = 'FRAME'\n"
            f"                  THEN CAST('{unread_of_frames}' AS text[]) ELSE CAST('{{}}' AS text[]) END FROM {row}"
        )

    whole = (_SQL / "caps_settle.sql").read_text(encoding="utf-8")
    function = whole[whole.index("CREATE OR REPLACE FUNCTION opencue_sched_caps_changed") :]
    op.execute(f"SELECT set_config('lock_timeout', '{TABLE_LOCK_SECONDS * 1000:.0f}ms', true)")
    with op.get_bind().connection.cursor() as cursor:
        cursor.execute(function.replace(_OF_MAXIMA, f"{read('after')}\n                  EXCEPT {read('before')}"))


def upgrade() -> None:
    _replace_function("{int_soft_value}")


def downgrade() -> None:
    _replace_function("{ts_reported, int_report_ttl, int_soft_value, str_enforcement}")
