"""An index of the tags of hosts as they are compared, without spaces and case, in place of that of their spelling."""

from __future__ import annotations

from alembic import op

from opencue_sched.store.tags import compared_tag

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None

_NAME = "opencue_sched_host_tag"
"""That of the index of revision 0003, which no statement uses any more."""


def upgrade() -> None:
    with op.get_context().autocommit_block():
        # A build that was cut short leaves an invalid index under the name.
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_NAME}")
        op.execute(f"CREATE INDEX CONCURRENTLY {_NAME} ON host_tag ({compared_tag('str_tag')})")


def downgrade() -> None:
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_NAME}")
