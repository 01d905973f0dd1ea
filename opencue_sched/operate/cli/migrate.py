"""``opencue-sched migrate``."""

from __future__ import annotations

import click

from opencue_sched.operate.cli.output import working
from opencue_sched.settings import get_settings
from opencue_sched.store.engine import make_engine
from opencue_sched.store.schema import downgrade, revision_of, upgrade


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
    if down:
        if not yes:
            click.confirm("Remove the scheduler's objects from this database?", abort=True)
        with working("removing"):
            downgrade(url, "base")
        click.echo("removed")
        return
    engine = make_engine(get_settings(), application_name="opencue-sched-migrate", pool_size=1)
    try:
        with engine.connect() as connection:
            before = revision_of(connection)
        with working("migrating the schema"):
            upgrade(url)
        with engine.connect() as connection:
            after = revision_of(connection)
    finally:
        engine.dispose()
    if after == before:
        click.echo(f"the schema was up to date (revision {after})")
    elif before is None:
        click.echo(f"the schema's objects were made (revision {after})")
    else:
        click.echo(f"the schema was brought from revision {before} to {after}")
