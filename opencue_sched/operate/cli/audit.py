"""``opencue-sched audit``."""

from __future__ import annotations

import click

from opencue_sched.operate.audit import run_audit
from opencue_sched.operate.cli.connect import farm, redis_store
from opencue_sched.operate.cli.output import json_option, show_json, working
from opencue_sched.settings import get_settings

UNDECIDED_STATUS = 3


@click.command("audit")
@json_option
def command(as_json: bool) -> None:
    """Check the invariants against PostgreSQL and Redis.

    One line each, with figures, of a farm at rest or at work. Exit status 1 if any fails; 3 if none fails but something
    changed each time it was looked at (undecided: run it again). What state cannot show names the test that shows it.

    Example: opencue-sched audit --json | jq .failed
    """
    with farm() as (engine, _), redis_store() as client, working("checking the invariants"):
        report = run_audit(engine, client, get_settings())
    if as_json:
        show_json(report.as_dict())
    else:
        click.echo("\n".join(report.lines()))
    if report.failed:
        raise click.exceptions.Exit(1)
    if report.undecided:
        raise click.exceptions.Exit(UNDECIDED_STATUS)
