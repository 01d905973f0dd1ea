"""Two indexes that gathering work wants and OpenCue (up to V49) has not, built without blocking a live farm."""

from __future__ import annotations

from collections.abc import Sequence

from alembic import op
from sqlalchemy import Connection, text

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_FRAME = "opencue_sched_frame_waiting"
_HOST_TAG = "opencue_sched_host_tag"

_EQUIVALENT_INDEX = text(
    """
    SELECT EXISTS (
        SELECT FROM pg_index i
        WHERE i.indrelid = to_regclass(:table) AND i.indisvalid
          AND (SELECT array_agg(a.attname::text ORDER BY k.place)
               FROM unnest(i.indkey::smallint[]) WITH ORDINALITY k (attnum, place)
               JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = k.attnum
               WHERE k.place <= :width) = CAST(:columns AS text[])
          AND CASE WHEN :predicate = '' THEN i.indpred IS NULL
                   ELSE pg_get_expr(i.indpred, i.indrelid) LIKE '%''' || :predicate || '''%' END
    )
    """
)


def _has_equivalent(connection: Connection, table: str, columns: Sequence[str], *, predicate: str = "") -> bool:
    """Whether a valid index of ``table`` begins with ``columns`` and is partial on the quoted word ``predicate``."""
    asked = {"table": table, "columns": list(columns), "width": len(columns), "predicate": predicate}
    return bool(connection.scalar(_EQUIVALENT_INDEX, asked))


def upgrade() -> None:
    connection = op.get_bind()
    wanted = []
    if not _has_equivalent(connection, "frame", ("pk_layer", "int_dispatch_order"), predicate="WAITING"):
        wanted.append((_FRAME, "frame (pk_layer, int_dispatch_order, int_layer_order) WHERE str_state = 'WAITING'"))
    if not _has_equivalent(connection, "host_tag", ("str_tag",)):
        wanted.append((_HOST_TAG, "host_tag (str_tag)"))
    with op.get_context().autocommit_block():
        for name, definition in wanted:
            # A build that was cut short leaves an invalid index under the name.
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
            op.execute(f"CREATE INDEX CONCURRENTLY {name} ON {definition}")


def downgrade() -> None:
    with op.get_context().autocommit_block():
        for name in (_FRAME, _HOST_TAG):
            op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {name}")
