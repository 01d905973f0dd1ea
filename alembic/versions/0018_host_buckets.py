"""An index of the buckets of hosts, by which each worker reads its own again, built without blocking a live farm.

A host's bucket follows from its id alone, so no change of a host writes into this index.
"""

from __future__ import annotations

from alembic import op

from opencue_sched.store.hosts import bucket

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None

_NAME = "opencue_sched_host_bucket"


def upgrade() -> None:
    with op.get_context().autocommit_block():
        # A build that was cut short leaves an invalid index under the name.
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_NAME}")
        op.execute(f"CREATE INDEX CONCURRENTLY {_NAME} ON host (({bucket('pk_host')}))")


def downgrade() -> None:
    with op.get_context().autocommit_block():
        op.execute(f"DROP INDEX CONCURRENTLY IF EXISTS {_NAME}")
