"""``opencue-sched submit``."""

from __future__ import annotations

from dataclasses import asdict
from typing import BinaryIO

import click

from opencue_sched.cli.inputs import current_user, farm
from opencue_sched.cli.job_follow import Ended, exit_as, wait_for
from opencue_sched.cli.output import json_option, show_json, working
from opencue_sched.domain.farm import counted
from opencue_sched.farm.job_file import read_job_file
from opencue_sched.farm.submission import Submitted, submit_job
from opencue_sched.insight.explain import unserved
from opencue_sched.settings import get_settings
from opencue_sched.store.shows import NamedRow
from opencue_sched.text_file import InvalidFile


@click.command("submit")
@click.argument("file", type=click.File("rb"))
@click.option("--paused", is_flag=True, help="Submit it paused, whatever the file says.")
@click.option("--dry-run", is_flag=True, help="Check everything and show what would go in, but leave nothing.")
@click.option("--wait", is_flag=True, help="Show how far it is, until it has ended: like `job wait`.")
@json_option
def command(file: BinaryIO, paused: bool, dry_run: bool, wait: bool, as_json: bool) -> None:
    """Submit a job file, YAML or JSON; - reads standard input.

    The format is described in docs/job-file.md. All fields that are wrong are said at once, and then
    nothing is stored. What the farm could not serve today (tags, OS, sizes, subscriptions, services) is noted on
    standard error, or as `notes` with --json; the job goes in all the same. Exit status: 0 submitted, 1 refused.
    With --wait, 0 all frames succeeded, 1 refused, or ended otherwise; Ctrl-C ends the waiting, not the job.

    Example: opencue-sched submit examples/animation.yaml --paused
    """
    if wait and dry_run:
        raise click.UsageError("what is not submitted cannot be waited for")
    try:
        spec = read_job_file(file, default_user=current_user())
        with farm() as (engine, _), working(f"submitting {spec.name}"):
            submitted = submit_job(engine, spec, get_settings(), paused=paused, dry_run=dry_run, unserved=unserved)
    except InvalidFile as error:
        if as_json:
            show_json({"submitted": False, "problems": error.problems})
        for problem in error.problems:
            click.echo(f"{getattr(file, 'name', '<stdin>')}: {problem}", err=True)
        click.echo(f"not submitted: {counted(len(error.problems), 'problem')}", err=True)
        raise click.exceptions.Exit(1) from error
    document = {"submitted": not dry_run, "job": submitted.name, **asdict(submitted)}
    if not as_json:
        click.echo("\n".join(_lines(submitted)))
        for note in submitted.notes:
            click.echo(f"note: {note}", err=True)
    ended: list[Ended] = []
    try:
        if wait:
            with farm() as (engine, _):
                ended = wait_for(engine, [NamedRow(submitted.job_id, submitted.name)], quiet=as_json)
    finally:  # also when Ctrl-C ends the waiting: the job is there
        if as_json:
            show_json({**document, "ended": asdict(ended[0])} if ended else document)
    exit_as(ended)


def _lines(submitted: Submitted) -> list[str]:
    verb = "would submit" if submitted.dry_run else "submitted"
    paused = ", paused" if submitted.paused else ""
    lines = [f"{verb} {submitted.name} ({counted(submitted.frames, 'frame')}{paused})"]
    if not submitted.dry_run:
        lines.append(f"  id      {submitted.job_id}")
    lines.append(f"  logs    {submitted.log_dir}")
    for layer in submitted.layers:
        held = layer.frames - layer.waiting
        waits = "" if not held else f", {held if layer.waiting else 'all'} waiting for other frames"
        lines.append(f"  layer   {layer.name}: {counted(layer.frames, 'frame')}{waits}")
    return lines
