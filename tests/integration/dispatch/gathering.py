"""What the gather tests share: a farm of one test, and gathering its default cluster."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from sqlalchemy import Connection, Engine, event, text

from opencue_sched.dispatch.gather import Gathered, gather
from opencue_sched.domain.cluster import Cluster, ClusterKind
from opencue_sched.embedded.farm import Farm
from opencue_sched.settings import Settings
from opencue_sched.store.pending import SkippedLayers
from opencue_sched.store.schema import check_schema


def cluster_of(farm: Farm, *tags: str, show_id: str | None = None) -> Cluster:
    """A cluster of the default show in the default facility; by default that of its allocation."""
    show = show_id or farm.default_show().id
    if not tags:
        return Cluster(farm.facility(), show, ClusterKind.ALLOC, ("general",), farm.default_alloc().id)
    return Cluster(farm.facility(), show, ClusterKind.MANUAL, tuple(sorted(tags)))


def gathered(
    connection: Connection,
    cluster: Cluster,
    settings: Settings,
    *,
    skipped: SkippedLayers | None = None,
    **queue: Any,
) -> Gathered:
    """Gather with some queue settings changed, without some layers."""
    changed = settings.model_copy(update={"queue": settings.queue.model_copy(update=queue)})
    facts = check_schema(connection)
    return gather(connection, cluster, changed, facts=facts, skip=lambda _room: skipped or SkippedLayers())


def with_start_times(engine: Engine) -> None:
    """The column that a Cuebot before V47 has not."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE layer ADD COLUMN IF NOT EXISTS ts_start_after timestamptz"))


def job_ids(result: Gathered) -> list[str]:
    return [job.id for job in result.snapshot.jobs]


@contextmanager
def counted_statements(engine: Engine) -> Iterator[list[str]]:
    """The statements sent through the engine meanwhile."""
    statements: list[str] = []

    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", count)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", count)
