"""What the gather tests share: a farm of one test, and gathering its default cluster."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Engine, event, text

from opencue_sched.dispatch.gather import GatheredCluster, gather
from opencue_sched.domain.caps import Caps
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.plans import Snapshot
from opencue_sched.domain.verdicts import LayerVerdict
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.settings import Settings
from opencue_sched.store.pending import SkippedLayers
from opencue_sched.store.schema import SchemaFacts, check_schema


def cluster_of(farm: Farm, *tags: str, show_id: str | None = None) -> Cluster:
    """A cluster of the default show in the default facility; by default that of its allocation."""
    show = show_id or farm.default_show().id
    if not tags:
        return Cluster(farm.facility(), show, ClusterKind.ALLOC, ("general",), farm.default_alloc().id)
    return Cluster(farm.facility(), show, ClusterKind.MANUAL, tuple(sorted(tags)))


@dataclass(frozen=True)
class OneGathered:
    """What was gathered of one cluster."""

    snapshot: Snapshot
    cluster: GatheredCluster

    @property
    def bad_layers(self) -> tuple[LayerVerdict, ...]:
        return self.cluster.bad_layers

    @property
    def held_back(self) -> bool:
        return self.cluster.held_back

    @property
    def more(self) -> bool:
        return self.cluster.more

    @property
    def versions(self) -> Mapping[str, str]:
        return self.cluster.versions


def gathered(
    connection: Connection,
    cluster: Cluster,
    settings: Settings,
    *,
    skipped: SkippedLayers | None = None,
    **queue: Any,
) -> OneGathered:
    """Gather with some queue settings changed, without some layers."""
    changed = settings.model_copy(update={"queue": settings.queue.model_copy(update=queue)})
    facts = check_schema(connection)
    return gather_one(connection, cluster, changed, facts, skipped=skipped)


def gather_one(
    connection: Connection,
    cluster: Cluster,
    settings: Settings,
    facts: SchemaFacts,
    *,
    skipped: SkippedLayers | None = None,
) -> OneGathered:
    snapshot, (of_cluster,) = gather(
        connection,
        [cluster],
        settings,
        facts=facts,
        in_use=lambda _: live_use(connection),
        most_frames=settings.queue.dispatch_frames_per_layer_limit,
        skip=lambda *_: skipped or SkippedLayers(),
    )
    return OneGathered(snapshot, of_cluster)


def live_use(database: Connection | Engine) -> dict[tuple[str, str], int]:
    """What the ledger would say of a farm that was built without it. By the driver, as no statement of the gather's."""
    if isinstance(database, Engine):
        with database.connect() as connection:
            return live_use(connection)
    with database.connection.cursor() as cursor:
        cursor.execute(
            "SELECT p.pk_show, h.pk_alloc, sum((p.int_cores_reserved + 99) / 100)"
            " FROM proc p JOIN host h USING (pk_host) WHERE NOT p.b_local GROUP BY p.pk_show, h.pk_alloc"
        )
        return {(show, alloc): int(cores) for show, alloc, cores in cursor.fetchall()}


def with_start_times(engine: Engine) -> None:
    """The column that a Cuebot before V47 has not."""
    with engine.begin() as connection:
        connection.execute(text("ALTER TABLE layer ADD COLUMN IF NOT EXISTS ts_start_after timestamptz"))


def by_alloc(result: OneGathered) -> dict[str, Caps]:
    """The caps of the show's subscriptions, by allocation."""
    return {alloc_id: caps for (_, alloc_id), caps in result.snapshot.subscriptions.items()}


def job_ids(result: OneGathered) -> list[str]:
    return [job.id for job in result.snapshot.work[0].jobs]


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
