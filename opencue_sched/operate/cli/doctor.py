"""``opencue-sched doctor``."""

from __future__ import annotations

import click

from opencue_sched.operate.cli.connect import database, redis_store
from opencue_sched.operate.cli.output import json_option, show_json
from opencue_sched.operate.doctor import diagnose
from opencue_sched.settings import get_settings


@click.command("doctor")
@json_option
def command(as_json: bool) -> None:
    """Say whether everything a scheduler needs is there, and what to do about what is not.

    Looks at PostgreSQL, the schema, Redis, clocks, shows, hosts, RQDs, the release feed and the workers. Exit status 1
    if something must be put right; warnings alone exit 0.

    Example: opencue-sched doctor --json | jq '.findings[] | select(.level == "FAIL")'
    """
    with database() as engine, redis_store() as client:
        diagnosis = diagnose(engine, client, get_settings())
    if as_json:
        show_json(diagnosis.as_dict())
    else:
        click.echo("\n".join(diagnosis.lines()))
    if diagnosis.failed:
        raise click.exceptions.Exit(1)
