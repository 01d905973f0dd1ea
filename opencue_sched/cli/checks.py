"""``opencue-sched audit``, ``doctor``, ``explain`` and ``fleet``: commands that look and change nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from typing import Any

import click
import redis
from sqlalchemy import Engine
from sqlalchemy.exc import OperationalError

from opencue_sched.accounting.epoch import guarded_redis
from opencue_sched.cli.inputs import JOB, TOP, database, layer_ids, redis_store, with_names
from opencue_sched.cli.output import HIGH, LOW, NAME, Column, Columns, Done, working
from opencue_sched.domain.units import duration_text
from opencue_sched.errors import StoreUnusable
from opencue_sched.insight.audit import run_audit
from opencue_sched.insight.doctor import diagnose
from opencue_sched.insight.explain import NOTHING_SAID, PassesSaid, explain_job, explanation_lines, passes_over
from opencue_sched.insight.fleet import fleet_view
from opencue_sched.insight.frame_logs import deaths_of
from opencue_sched.insight.health import describe_failure
from opencue_sched.settings import get_settings
from opencue_sched.store.fences import PersistentFences
from opencue_sched.store.jobs import job_of
from opencue_sched.store.named_rows import NamedRow
from opencue_sched.store.schema import check_schema


@TOP.on_farm("audit --json | jq .failed")
def audit_command(engine: Engine) -> Done:
    """Check the invariants against PostgreSQL and Redis.

    One line each, with figures, of a farm at rest or at work. Exit status 1 if any fails.
    """
    with redis_store() as client, working("checking the invariants"):
        report = run_audit(engine, client, get_settings())
    return Done(with_names(report.lines()), report.as_dict(), status=1 if report.failed else 0)


@TOP.answers("""doctor --json | jq '.findings[] | select(.level == "FAIL")'""")
def doctor_command() -> Done:
    """Say whether everything a scheduler needs is there, and what to do about what is not.

    Looks at PostgreSQL, the schema, Redis, shows, hosts, RQDs, the release feed and the workers. Exit status 1
    if something must be put right; warnings alone exit 0.
    """
    settings = get_settings()
    with database() as engine, guarded_redis(settings.redis_dsn, settings) as client:
        report = diagnose(engine, client, settings)
    return Done(report.lines(), report.as_dict(), status=1 if report.failed else 0)


def _passes(job_id: str, show_id: str) -> PassesSaid:
    """What `passes_over` says; nothing, and a note, without Redis."""
    try:
        with redis_store() as client:
            return passes_over(client, get_settings(), job_id, show_id)
    except (redis.RedisError, StoreUnusable) as error:
        click.echo(f"note: {describe_failure(error, get_settings())}; the last verdicts are not known", err=True)
        return NOTHING_SAID


@TOP.on_farm("explain demo-sh010-alice_comp_v001 --layer render")
@click.argument("job", type=JOB)
@click.option("--layer", metavar="NAME", help="Only this layer, with every reason found.")
def explain_command(engine: Engine, job: NamedRow, layer: str | None) -> Done:
    """Say why a job's frames are waiting.

    One line for each layer with something left to do: what the database says holds it back, else the verdict of the
    last pass that looked at it, and what of its show comes first where none has come to it. With --layer, or as JSON,
    every reason, the one that explains most first. Then, where only other work is in the way, how the job stands: its
    place among the show's jobs by rank and in the draw. Of dead frames: what their exit status means, and the end of
    the newest one's log where it is visible on this machine.
    """
    with engine.connect() as connection:
        ids = layer_ids(connection, job, [] if layer is None else [layer])
        deaths = deaths_of(connection, job.id)
        passes = _passes(job.id, job_of(connection, job.id).show_id)
        found = explain_job(connection, job.id, get_settings(), passes, deaths)
    found = replace(found, layers=tuple(layer for layer in found.layers if ids is None or layer["id"] in ids))
    return Done(explanation_lines(found, every_reason=layer is not None), asdict(found))


_WORKER_COLUMNS = Columns(
    Column("instance", "Instance", importance=NAME),
    Column("group", "Group", importance=LOW),
    Column("hostname", "Host"),
    Column("pid", "Pid", importance=LOW),
    Column("state", "State", importance=HIGH),
    Column("", "In hand", lambda worker: f"{worker['in_flight']}/{worker['capacity']}"),
    Column("up_seconds", "Up", show=duration_text),
    Column("heartbeat_seconds_ago", "Seen", show="{:.0f}s ago".format, importance=HIGH),
    Column("types", "Types", show=", ".join, importance=LOW),
    Column("work", "Works on", show=", ".join, importance=HIGH, wraps=True),
)
_QUEUE_COLUMNS = Columns(
    Column("type", "Queue", importance=NAME),
    Column("depth", "Waiting"),
    Column("oldest_seconds", "Oldest", show="{:.1f}s".format),
    Column(
        "queues",
        "Where",
        show=lambda queues: ", ".join(f"{name} {depth}" for name, depth in queues.items()),
        wraps=True,
    ),
)


@TOP.answers("fleet --json | jq .leader")
def fleet_command() -> Done:
    """Show who is alive, who leads, what each works on, and what waits."""
    with redis_store() as client, database() as engine:
        try:
            with engine.connect() as connection:
                check_schema(connection)
        except OperationalError as error:  # most of what is known of the fleet is in Redis
            click.echo(f"warning: {describe_failure(error, get_settings())}", err=True)
        view = fleet_view(client, get_settings(), PersistentFences(engine))
    return Done(list(_fleet_lines(view)), view)


def _fleet_lines(view: dict[str, Any]) -> Iterator[str]:
    """What ``opencue-sched fleet`` prints of a fleet view (insight.fleet): who leads, the beats, the workers, the
    queues, the clusters' postings, the backlog of each group for each of its workers, and who is gone lately."""
    yield view["leader"]["words"]
    said = [
        f"{beat['instance']} on {beat['hostname']} {'leads' if beat['fence'] else 'stands by'}"
        for beat in view["beats"]
    ]
    yield f"beats: {', '.join(said) or 'none alive'}"
    yield from _WORKER_COLUMNS.lines(view["workers"]) if view["workers"] else ["workers: none alive"]
    queues = [{"type": name, **figures} for name, figures in view["queues"].items()]
    yield from ["", *_QUEUE_COLUMNS.lines(queues), ""]
    clusters = "{ready} ready, {claimed} worked on, {delayed} delayed, {trash} trashed".format_map(view["postings"])
    yield f"clusters: {clusters} (opencue-sched board list)"
    backlog = ", ".join(f"{group} {number:g}" for group, number in view["backlog_per_worker"].items())
    yield f"backlog per worker: {backlog}"
    if view["gone"]:
        yield f"gone lately: {', '.join(sorted({key.rpartition(':')[2] for key in view['gone']}))}"
