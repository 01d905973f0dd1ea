"""The command ``opencue-sched submit``: check a job file, submit it, and wait for the job if asked to."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import BinaryIO

import click

from opencue_sched.cli.inputs import TOP, current_user, farm
from opencue_sched.cli.job_wait import wait_for
from opencue_sched.cli.output import Done, asked_for_json, working
from opencue_sched.domain.names import plural
from opencue_sched.insight.explain import unserved
from opencue_sched.jobs.job_file import JobSpec
from opencue_sched.jobs.submission import Submitted, submit_job
from opencue_sched.settings import get_settings
from opencue_sched.store.named_rows import NamedRow
from opencue_sched.text_file import InvalidFile, read_yaml


@TOP.answers("submit examples/animation.yaml --paused")
@click.argument("file", type=click.File("rb"))
@click.option("--paused", is_flag=True, help="Submit it paused, whatever the file says.")
@click.option("--dry-run", is_flag=True, help="Check everything and show what would go in, but leave nothing.")
@click.option("--wait", is_flag=True, help="Show how far it is, until it has ended: like `job wait`.")
def command(file: BinaryIO, paused: bool, dry_run: bool, wait: bool) -> Done:
    """Submit a job file, YAML or JSON; - reads standard input.

    The format is described in docs/job-file.md. All fields that are wrong are said at once, and then
    nothing is stored. What the farm could not serve today (tags, OS, sizes, subscriptions, services) is noted on
    standard error, or as `notes` with --json; the job goes in all the same. Exit status: 0 submitted, 1 refused.
    With --wait, 0 all frames succeeded, 1 refused, or ended otherwise; Ctrl-C ends the waiting, not the job.
    """
    if wait and dry_run:
        raise click.UsageError("what is not submitted cannot be waited for")
    try:
        spec = JobSpec.parse(read_yaml(file), default_user=current_user())
        spec = spec.model_copy(update={"paused": spec.paused or paused})
        with farm() as engine, working(f"submitting {spec.name}"):
            submitted = submit_job(engine, spec, get_settings(), dry_run=dry_run, unserved=unserved)
    except InvalidFile as error:
        problems = [f"{getattr(file, 'name', '<stdin>')}: {problem}" for problem in error.problems]
        refusal = f"not submitted: {plural(len(problems), 'problem')}"
        return Done([], {"submitted": False, "problems": error.problems}, [*problems, refusal], status=1)
    notes = [] if asked_for_json() else [f"note: {note}" for note in submitted.notes]
    document = {"submitted": not dry_run, "job": submitted.name, **asdict(submitted)}
    if not wait:
        return Done(_lines(submitted), document, notes)
    for line in _lines(submitted):
        click.echo(line, err=asked_for_json())  # before the waiting, which Ctrl-C may end: the job is there
    for note in notes:
        click.echo(note, err=True)
    with farm() as engine:
        done = wait_for(engine, [NamedRow(submitted.job_id, submitted.name)])
    return replace(done, document={**document, "ended": done.document[0]})


def _lines(submitted: Submitted) -> list[str]:
    """The lines for people: the job, its id (none after a dry run), where its logs go, and its layers."""
    verb = "would submit" if submitted.dry_run else "submitted"
    paused = ", paused" if submitted.paused else ""
    lines = [f"{verb} {submitted.name} ({plural(submitted.frames, 'frame')}{paused})"]
    if not submitted.dry_run:
        lines.append(f"  id      {submitted.job_id}")
    lines.append(f"  logs    {submitted.log_dir}")
    for layer in submitted.layers:
        depending = layer.frames - layer.waiting
        note = "" if not depending else f", {depending if layer.waiting else 'all'} waiting for other frames"
        lines.append(f"  layer   {layer.name}: {plural(layer.frames, 'frame')}{note}")
    return lines
