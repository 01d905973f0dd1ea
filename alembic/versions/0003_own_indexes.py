"""Two indexes that gathering work wants and OpenCue (up to V49) has not, built without blocking a live farm."""

from __future__ import annotations

from alembic import op

from opencue_sched.store.schema import has_equivalent_index

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_FRAME = "opencue_sched_frame_waiting"
_HOST_TAG = "opencue_sched_host_tag"


def upgrade() -> None:
    connection = op.get_bind()
    wanted = []
    if not has_equivalent_index(connection, "frame", ("pk_layer", "int_dispatch_order"), predicate="WAITING"):
        wanted.append((_FRAME, "frame (pk_layer, int_dispatch_order, int_layer_order) WHERE str_state = 'WAITING'"))
    if not has_equivalent_index(connection, "host_tag", ("str_tag",)):
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
