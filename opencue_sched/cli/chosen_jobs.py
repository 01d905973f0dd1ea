"""The jobs that a command changes: those that are named, or all pending ones that a filter finds. A comment on each job
says who changed it, and why."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Collection, Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Connection, Engine

from opencue_sched.cli.comments import NOBODY
from opencue_sched.cli.deferred import who_and_why
from opencue_sched.cli.inputs import JOB, SHOW, Body, ask_first, current_user
from opencue_sched.cli.output import Columns, Done
from opencue_sched.clients.postgres import ask
from opencue_sched.domain.names import plural
from opencue_sched.domain.states import JobState
from opencue_sched.errors import InvalidInput
from opencue_sched.store import jobs
from opencue_sched.store.comments import add_comment
from opencue_sched.store.named_rows import NamedRow, id_of

if TYPE_CHECKING:
    from opencue_sched.reports.completion import Note


def choosing_jobs(verb: str, columns: Columns, *, asks: bool = False) -> Callable[[Body], Body]:
    """Give a command of `Commands.on_farm` jobs by name, --show, --user and --name: its function gets ``chosen``, a
    list of jobs that is not empty.

    Jobs that a filter found are listed in ``columns``, and a person has to agree to "``verb`` 12 jobs?", unless --yes
    is given; of jobs that were named that is asked only where the command ``asks``.
    """

    def decorate(function: Body) -> Body:
        @click.argument("chosen", type=JOB, nargs=-1)
        @click.option("--show", type=SHOW, help="All pending jobs of this show.")
        @click.option("--user", metavar="NAME", help="All pending jobs of this user.")
        @click.option("--name", "part", metavar="PART", help="All pending jobs with this in their name.")
        @click.option("--yes", is_flag=True, help="Do not ask.")
        @wraps(function)
        def run(
            engine: Engine,
            chosen: Sequence[NamedRow],
            show: NamedRow | None,
            user: str | None,
            part: str | None,
            *,
            yes: bool,
            **given: Any,
        ) -> Done:
            filtered = any(word is not None for word in (show, user, part))
            # An empty part, of a variable that a script has not set, say, would be in the name of every job.
            if filtered == bool(chosen) or "" in (user, part):
                raise click.UsageError("name jobs, or choose them by --show, --user or --name")
            if filtered:
                chosen = _found(engine, columns, show_id=id_of(show), user=user, part=part)
            if not yes and (asks or filtered):
                named = plural(len(chosen), "job") if filtered else ", ".join(job.name for job in chosen)
                ask_first(f"{verb} {named}?")
            return function(engine, chosen=chosen, **given)

        return run

    return decorate


def _found(engine: Engine, columns: Columns, **wanted: Any) -> list[NamedRow]:
    """The pending jobs that a filter finds, listed on standard error. Raises InvalidInput where there are none."""
    found = ask(engine, jobs.list_jobs, state=JobState.PENDING.value, **wanted)
    if not found:
        raise InvalidInput("no pending job is chosen so; `opencue-sched job list` takes the same options")
    for line in columns.lines(found):
        click.echo(line, err=True)
    return [NamedRow(job.id, job.name) for job in found]


def comment_on_jobs(
    connection: Connection, job_ids: Sequence[str], did: str, reason: str | None, *, comment_id: str | None = None
) -> None:
    """Write on jobs what the person who runs this command did to them, as a comment that Cuebot's tools show, too. With
    a ``comment_id``, of one job, a comment of that id is changed."""
    user, message = current_user() or NOBODY, who_and_why(did, reason)
    add_comment(connection, "job", job_ids, user=user, subject=did, message=message, comment_id=comment_id)


def commenting(job_id: str, verb: str, reason: str | None, *, of_frames: bool = True) -> Note:
    """A Note that writes one comment on a job, in each transaction that changes frames of the job, or (not
    ``of_frames``) the job as a whole: nothing is changed without the comment.

    Each transaction writes the comment anew with all frames that were changed so far, so a transaction that is rolled
    back leaves no trace in it.
    """
    comment_id = str(uuid.uuid4())

    def note(connection: Connection, frame_ids: Collection[str]) -> None:
        did = f"{plural(len(set(frame_ids)), 'frame')} {verb}" if of_frames else verb
        comment_on_jobs(connection, [job_id], did, reason, comment_id=comment_id)

    return note
