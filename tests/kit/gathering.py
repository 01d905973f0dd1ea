"""What tests of passes share: clusters of a farm, what waits there, and what is in use."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, Engine, event, text

from opencue_sched.accounting import keys
from opencue_sched.accounting.keys import VertexCaps, VertexKind
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.domain.jobs import Job, Layer
from opencue_sched.domain.units import cap_cores, enforced
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.store.backlog import fetch_layers, fetch_portions
from opencue_sched.store.pending import fetch_shares
from opencue_sched.store.schema import SchemaFacts, check_schema


def cluster_of(farm: Farm, *tags: str, show_id: str | None = None) -> Cluster:
    """A cluster of the default show in the default facility; by default that of its allocation."""
    show = show_id or farm.default_show().id
    if not tags:
        return Cluster(farm.facility(), show, ClusterKind.ALLOC, ("general",), farm.default_alloc().id)
    return Cluster(farm.facility(), show, ClusterKind.MANUAL, tuple(sorted(tags)))


def waiting_jobs(connection: Connection, facts: SchemaFacts | None = None, *, most: int = 1000) -> list[Job]:
    """All that waits in the order of rank, each layer with its first frames."""
    facts = facts or check_schema(connection)
    rows = fetch_layers(connection, facts, facilities=None).layers
    portions = fetch_portions(connection, facts, {row.layer.id: most for row in rows})
    frames = {portion.layer_id: portion.frames for portion in portions}
    layers: defaultdict[str, list[Layer]] = defaultdict(list)
    jobs = {row.job.id: row.job for row in rows}
    for row in sorted(rows, key=lambda row: (row.layer.dispatch_order, row.layer.id)):
        layers[row.job.id].append(replace(row.layer, frames=frames[row.layer.id]))
    in_order = sorted(jobs.values(), key=lambda job: (-job.priority, job.started_at, job.id))
    return [replace(job, layers=tuple(layers[job.id])) for job in in_order]


def with_bookable_work(
    connection: Connection, clusters: Iterable[Cluster], facts: SchemaFacts | None = None
) -> set[Cluster]:
    """Those of the clusters of which a plan would take frames, if there were hosts and no caps."""
    facts = facts or check_schema(connection)
    shows = {row.show_id for row in fetch_shares(connection) if row.may_book and row.burst_centicores > 0}
    rows = [
        row
        for row in fetch_layers(connection, facts, facilities=None).layers
        if row.job.show_id in shows and row.job.quarantined_until is None and row.layer.starts_at is None
    ]
    return {
        cluster
        for cluster in clusters
        for row in rows
        if (row.job.facility_id, row.job.show_id) == (cluster.facility_id, cluster.show_id)
        and not row.layer.tags.isdisjoint(cluster.tags)
    }


def live_caps(engine: Engine, vertices: Sequence[str]) -> dict[str, VertexCaps]:
    """What the ledger would say of a farm that was built without it."""
    with engine.connect() as connection:
        runs = connection.exec_driver_sql(
            "SELECT p.pk_show, h.pk_alloc, j.pk_folder, p.pk_job, p.b_local,"
            " (LEAST(GREATEST(p.int_cores_reserved, 0), 2147483647) + 99) / 100 AS cores, p.int_gpus_reserved AS gpus,"
            " ARRAY(SELECT DISTINCT pk_limit_record FROM layer_limit l WHERE l.pk_layer = p.pk_layer) AS limits"
            " FROM proc p JOIN host h USING (pk_host) JOIN job j USING (pk_job)"
        ).all()
        caps: dict[str, tuple[int, int]] = {}
        for statement, key in (
            ("SELECT pk_show, pk_alloc, int_burst, 0 FROM subscription", keys.subscription),
            ("SELECT pk_folder, int_max_cores, int_max_gpus FROM folder_resource", keys.folder),
            ("SELECT pk_job, int_max_cores, int_max_gpus FROM job_resource", keys.job),
            ("SELECT pk_limit_record, COALESCE(int_max_value, 0), 0 FROM limit_record", keys.limit),
        ):
            caps |= {key(*row[:-2]): tuple(row[-2:]) for row in connection.exec_driver_sql(statement)}
    cores, gpus, frames = Counter[str](), Counter[str](), Counter[str]()
    for run in runs:
        for key in (keys.folder(run.pk_folder), keys.job(run.pk_job)):
            cores[key] += run.cores
            gpus[key] += run.gpus
        if not run.b_local:
            cores[keys.subscription(run.pk_show, run.pk_alloc)] += run.cores
        frames.update(map(keys.limit, run.limits))
    found = {}
    for key in vertices:
        parsed = keys.parse(key)
        if parsed is None or key not in caps:
            continue
        most_cores, most_gpus = caps[key]
        if parsed[0] is VertexKind.LIMIT:
            found[key] = VertexCaps(parsed[0], 0, 0, frames=frames[key], max_frames=max(0, most_cores))
        elif parsed[0] is VertexKind.SUBSCRIPTION:
            found[key] = VertexCaps(parsed[0], cores[key], 0, max_cores=max(0, cap_cores(most_cores)))
        else:
            most = enforced(cap_cores(most_cores or 0)), enforced(most_gpus)
            found[key] = VertexCaps(parsed[0], cores[key], gpus[key], *most)
    return found


def largest_use(told: Mapping[str, VertexCaps], live: Mapping[str, VertexCaps]) -> dict[str, VertexCaps]:
    """The caps that are live, with the larger of the two uses."""
    return {
        key: replace(
            caps,
            cores=max(caps.cores, told[key].cores),
            gpus=max(caps.gpus, told[key].gpus),
            frames=max(caps.frames, told[key].frames),
        )
        if key in told
        else caps
        for key, caps in live.items()
    }


def live_use(database: Connection | Engine) -> dict[tuple[str, str], int]:
    """What the ledger would say of a farm that was built without it. Read by the driver, so that no test counts the
    statement as one of the product's."""
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


@contextmanager
def counted_statements(engine: Engine | type[Engine]) -> Iterator[list[str]]:
    """The statements sent through the engine meanwhile, or through all engines of this process."""
    statements: list[str] = []

    def count(_connection: Any, _cursor: Any, statement: str, *_: Any) -> None:
        statements.append(statement)

    event.listen(engine, "before_cursor_execute", count)
    try:
        yield statements
    finally:
        event.remove(engine, "before_cursor_execute", count)


@contextmanager
def reads_by_table(connection: Connection) -> Iterator[dict[str, tuple[int, int]]]:
    """The sequential scans of each table meanwhile, and the rows that were found in it by an index."""
    query = text("SELECT relname, seq_scan, coalesce(idx_tup_fetch, 0) AS fetched FROM pg_stat_xact_user_tables")
    before = {row.relname: (row.seq_scan, row.fetched) for row in connection.execute(query)}
    read: dict[str, tuple[int, int]] = {}
    yield read
    for row in connection.execute(query):
        scans, fetched = before.get(row.relname, (0, 0))
        read[row.relname] = row.seq_scan - scans, row.fetched - fetched
