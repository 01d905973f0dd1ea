"""The jobs that a command changes: the jobs it names, or all pending jobs that a filter finds. A comment on each job
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
    """Decorate the function of a command (`Commands.on_farm`), so that the command takes names of jobs, or --show,
    --user and --name. The function gets ``chosen``, a list of jobs that is not empty.

    Jobs that a filter found are listed in ``columns``, and a person has to agree to "``verb`` 12 jobs?". Jobs that the
    command names need that agreement only with ``asks``. With --yes nothing is asked.
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
            # Names or a filter, not both. An empty text comes from a variable that a script has not set; every job has
            # an empty part in its name.
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
    """Find the pending jobs that pass a filter, and list them on standard error. Raises InvalidInput where there are
    none."""
    found = ask(engine, jobs.list_jobs, state=JobState.PENDING.value, **wanted)
    if not found:
        raise InvalidInput("no pending job is chosen so; `opencue-sched job list` takes the same options")
    for line in columns.lines(found):
        click.echo(line, err=True)
    return [NamedRow(job.id, job.name) for job in found]


def comment_on_jobs(
    connection: Connection, job_ids: Sequence[str], did: str, reason: str | None, *, comment_id: str | None = None
) -> None:
    """Write a comment on jobs: who runs this command, what that person ``did`` ("3 frames killed") and why. Cuebot's
    tools show the comment, too.

    ``comment_id`` is the id that the comment of a single job gets; a comment that has the id is written over.
    """
    user, message = current_user() or NOBODY, who_and_why(did, reason)
    add_comment(connection, "job", job_ids, user=user, subject=did, message=message, comment_id=comment_id)


def commenting(job_id: str, done: str, reason: str | None, *, of_frames: bool = True) -> Note:
    """A Note that writes what was ``done`` ("killed") as a comment on a job, in the transaction that does it: nothing
    is changed without the comment.

    The comment counts the frames that were changed; without ``of_frames`` it speaks of the job as a whole. There is one
    comment however many transactions there are. Each writes it anew, with all frames changed so far (which the caller
    of a Note gives), so a transaction that is rolled back leaves no trace in it.
    """
    comment_id = str(uuid.uuid4())

    def note(connection: Connection, frame_ids: Collection[str]) -> None:
        did = f"{plural(len(set(frame_ids)), 'frame')} {done}" if of_frames else done
        comment_on_jobs(connection, [job_id], did, reason, comment_id=comment_id)

    return note
