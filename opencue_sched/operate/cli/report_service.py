"""``opencue-sched report-service``."""

from __future__ import annotations

import os

import click

from opencue_sched.operate import metrics
from opencue_sched.operate.cli.connect import database, redis_store
from opencue_sched.operate.logs import configure_logging, install_level_signals
from opencue_sched.operate.setting_names import log_unknown_variables
from opencue_sched.operate.stores import check_stores
from opencue_sched.release.model import EventCounts
from opencue_sched.release.service import serve
from opencue_sched.settings import get_settings
from opencue_sched.store.schema import check_schema


@click.command("report-service")
def command() -> None:
    """Run the service that RQDs report to, where there is no Cuebot.

    Takes boot, status and completion reports on OPENCUE_SCHED_RELEASE__HOST and __PORT (127.0.0.1:8443). Several may
    run side by side. Ends on SIGTERM or Ctrl-C, once the completions it has are applied.

    Example: OPENCUE_SCHED_RELEASE__HOST=0.0.0.0 opencue-sched report-service
    """
    settings = get_settings()
    configure_logging(settings.logging)
    log_unknown_variables(os.environ)
    with database() as engine, redis_store() as client:
        check_stores(engine, client, settings)
        with engine.connect() as connection:
            check_schema(connection)
    install_level_signals()
    metrics.serve_metrics(settings.queue.metrics_host, settings.queue.metrics_port, metrics.REPORT_SERVICE)
    raise click.exceptions.Exit(serve(settings, counts=EventCounts(metrics.record_event)))
