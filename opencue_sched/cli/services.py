"""``opencue-sched migrate``, ``report-service`` and ``demo``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from rich.console import Console
from sqlalchemy import Engine
from sqlalchemy.exc import ProgrammingError

from opencue_sched.cli.inputs import TOP, WholeNumber, ask_first, database, farm, redis_store
from opencue_sched.cli.output import Done, working
from opencue_sched.clients.postgres import ask
from opencue_sched.errors import SchedulerError, StoreAway, StoreUnusable
from opencue_sched.insight.health import check_service_redis, describe_failure, does_not_answer
from opencue_sched.insight.limit_words import flagged_words
from opencue_sched.reports.service import serve
from opencue_sched.settings import get_settings
from opencue_sched.store.limits import flagged_limits
from opencue_sched.store.privileges import WRITES_OF_REPORT_SERVICES, check_privileges, missing_tables
from opencue_sched.store.schema import (
    Origin,
    check_writable,
    downgrade,
    newly_possible,
    read_origin,
    revision_of,
    set_frames_way,
    upgrade,
)
from opencue_sched.worker import metrics
from opencue_sched.worker.logs import configure_logging, install_level_signals
from opencue_sched.worker.probes import PULSE

_GOES: dict[Origin, str] = {
    "cuebot": "the objects named opencue_sched_*, with what they remember (Cuebot's tables stay)",
    "opencue-sched": "everything, its jobs, hosts and shows as well, with no way back but a backup",
}
"""What `migrate --down` removes, by the program that made the database."""


@contextmanager
def _needs_its_stores() -> Iterator[None]:
    """A context of what a supervisor starts: raises StoreAway for a store that does not answer, and StoreUnusable for a
    schema that lacks something or grants too little."""
    try:
        yield
    except ProgrammingError as error:
        raise StoreUnusable(describe_failure(error, get_settings())) from error
    except Exception as error:
        if not does_not_answer(error):
            raise
        raise StoreAway(describe_failure(error, get_settings())) from error


@TOP.answers("migrate")
@click.option("--down", is_flag=True, help="Remove our own objects again; on a schema of ours, everything.")
@click.option("--yes", is_flag=True, help="Do not ask before --down.")
@click.option(
    "--set-based-frames",
    is_flag=True,
    help="Also have bookings write Cuebot's counters and history once a plan; with --down only take that back.",
)
@_needs_its_stores()
def migrate_command(down: bool, yes: bool, set_based_frames: bool) -> Done:
    """Create or upgrade the database schema.

    On an empty database everything is created. On a database made by Cuebot (V45 or newer) only objects of our own are
    added, named opencue_sched_*; Cuebot's tables and history are not touched. The database is that of
    OPENCUE_SCHED_DATABASE_URL, such as postgresql://cuebot@db/cuebot.

    With --set-based-frames two of Cuebot's trigger functions also get an early return, for frames that a booking
    starts: it writes their counters and history at once. A later migrate without it keeps that.
    """
    url = get_settings().sqlalchemy_url
    with database() as engine:
        if down and set_based_frames:
            return _row_by_row(engine, url)
        before, possible = ask(engine, revision_of), ask(engine, newly_possible)
        flagged = ask(engine, flagged_limits)
        if down:
            document = {"before": before, "revision": None}
            if before is None:
                return Done("nothing of opencue-sched is there", document)
            if not yes:
                ask_first(f"Remove from {engine.url.database} {_GOES[ask(engine, read_origin)]}?")
            with working("removing"):
                downgrade(url)
            return Done("removed", document)
        with working("migrating the schema"):
            upgrade(url)
        after = ask(engine, revision_of)
        if missing := ask(engine, missing_tables):
            raise SchedulerError(
                f"the schema is of revision {after}, but somebody dropped {', '.join(missing)}: restore it from a "
                "backup; on a database made by Cuebot, `opencue-sched migrate --down` and `opencue-sched migrate` make "
                "our tables anew"
            )
        if set_based_frames:
            set_frames_way(url, set_based=True)
    done = "was" if after == before and not possible else "was brought"
    told = f"the schema {done} up to date (revision {after})"
    if set_based_frames:
        told += "; bookings write counters and history once a plan"
    notes = [f"note: {flagged_words(flagged)}"] if flagged else []
    return Done(told, {"before": before, "revision": after}, notes)


def _row_by_row(engine: Engine, url: str) -> Done:
    """Take back what --set-based-frames did, and nothing else."""
    revision = ask(engine, revision_of)
    set_frames_way(url, set_based=False)
    told = "Cuebot's triggers write counters and history row by row"
    return Done(told, {"before": revision, "revision": revision})


@click.command("report-service")
def report_service_command() -> None:
    """Run the service that RQDs report to, where there is no Cuebot.

    Takes boot, status and completion reports on OPENCUE_SCHED_RELEASE__HOST and __PORT (127.0.0.1:8443). Several may
    run side by side. Ends on SIGTERM, SIGHUP or Ctrl-C, once the completions it has are applied.

    Example: OPENCUE_SCHED_RELEASE__HOST=0.0.0.0 opencue-sched report-service
    """
    settings = get_settings()
    configure_logging(settings.logging)
    with _needs_its_stores(), farm() as engine, redis_store() as client:
        ask(engine, check_writable)
        ask(engine, check_privileges, WRITES_OF_REPORT_SERVICES)
        check_service_redis(client, settings, broker=False)  # both are fit for use
    install_level_signals()
    metrics.serve_metrics(settings.queue.metrics_host, settings.queue.metrics_port, metrics.REPORT_SERVICE)
    raise click.exceptions.Exit(serve(settings, count=metrics.record_event, alive=PULSE.beat))


@click.command("demo")
@click.option("--frames", default=48, show_default=True, type=WholeNumber(1, 999), help="Frames of the animation.")
@click.option("--hosts", default=3, show_default=True, type=WholeNumber(1, 20), help="Real RQD processes.")
@click.option("--workers", default=2, show_default=True, type=WholeNumber(1, 8), help="Celery workers.")
@click.option("--keep", is_flag=True, help="Leave the farm up until Ctrl-C.")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), default=Path("demo-output"), show_default=True
)
def demo_command(frames: int, hosts: int, workers: int, keep: bool, output: Path) -> None:
    """Render a real job on real RQDs, on this machine.

    Starts PostgreSQL and Redis from wheels on free ports, three real RQDs, the report service, two workers, beat and
    Flower; submits an animation and a contact sheet that depends on it; ends with the audit. Everything it started is
    stopped at the end, on failure and on Ctrl-C.

    Example: opencue-sched demo --keep
    """
    try:
        from opencue_sched.embedded.demo.run import DemoOptions, run_demo
    except ImportError as error:
        raise SchedulerError(f"the demo needs opencue-sched with its extra 'demo'; {error.name} is missing") from error
    options = DemoOptions(frames=frames, hosts=hosts, workers=workers, keep=keep, output=output)
    raise click.exceptions.Exit(run_demo(options, Console()))
