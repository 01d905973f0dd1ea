"""``opencue-sched migrate``."""

from __future__ import annotations

import click
from sqlalchemy import Engine

from opencue_sched.operate.cli.connect import database
from opencue_sched.operate.cli.output import counted, working
from opencue_sched.settings import get_settings
from opencue_sched.store.schema import downgrade, holdings, revision_of, upgrade


@click.command("migrate")
@click.option("--down", is_flag=True, help="Remove our own objects again; on a schema of ours, everything.")
@click.option("--yes", is_flag=True, help="Do not ask before --down.")
def command(down: bool, yes: bool) -> None:
    """Create or upgrade the database schema.

    On an empty database everything is created. On a database made by Cuebot (V45 or newer) only objects of our own are
    added, named opencue_sched_*; Cuebot's tables and history are not touched.

    Example: OPENCUE_SCHED_DATABASE_URL=postgresql://cuebot@db/cuebot opencue-sched migrate
    """
    url = get_settings().sqlalchemy_url
    with database() as engine:
        if down:
            if not yes:
                click.confirm(_question(engine), abort=True)
            with working("removing"):
                downgrade(url, "base")
            click.echo("removed")
            return
        with engine.connect() as connection:
            before = revision_of(connection)
        with working("migrating the schema"):
            upgrade(url)
        with engine.connect() as connection:
            after = revision_of(connection)
    if after == before:
        click.echo(f"the schema was up to date (revision {after})")
    elif before is None:
        click.echo(f"the schema's objects were made (revision {after})")
    else:
        click.echo(f"the schema was brought from revision {before} to {after}")


def _question(engine: Engine) -> str:
    """What goes, before it goes."""
    with engine.connect() as connection:
        lost = holdings(connection)
    if lost is None:
        return "Remove the scheduler's objects from this database?"
    where = f"{engine.url.database} at {engine.url.host}" if engine.url.host else str(engine.url.database)
    return (
        f"Everything in database {where} was made by opencue-sched, and all of it goes: "
        f"{counted(lost.shows, 'show')}, {counted(lost.jobs, 'job')}, all hosts, frames and history. "
        "There is no way back but a backup. Remove everything?"
    )
