"""``opencue-sched audit``."""

from __future__ import annotations

import click

from opencue_sched.operate.audit import run_audit
from opencue_sched.operate.cli.connect import database, redis_store
from opencue_sched.operate.cli.output import json_option, show_json, working
from opencue_sched.settings import get_settings


@click.command("audit")
@json_option
def command(as_json: bool) -> None:
    """Check the invariants against PostgreSQL and Redis.

    One line each, with figures. Exit status 1 if any fails. What state cannot show names the test that shows it.

    Example: opencue-sched audit --json | jq .failed
    """
    with database() as engine, redis_store() as client, working("checking the invariants"):
        report = run_audit(engine, client, get_settings())
    if as_json:
        show_json(report.as_dict())
    else:
        click.echo("\n".join(report.lines()))
    if report.failed:
        raise click.exceptions.Exit(1)
