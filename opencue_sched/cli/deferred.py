"""Frames that a command could not confirm dead: who may still run them, what becomes of them, and when."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Engine

from opencue_sched.cli.inputs import current_user, redis_store
from opencue_sched.cli.output import working
from opencue_sched.domain.names import plural
from opencue_sched.domain.states import FrameState, HardwareState
from opencue_sched.insight.silent_hosts import silent_hosts
from opencue_sched.settings import get_settings
from opencue_sched.store import jobs
from opencue_sched.store.hosts import full_names, list_procs
from opencue_sched.store.named_rows import NamedRow

if TYPE_CHECKING:
    from opencue_sched.jobs.control import FramesChanged, JobControl

REAPED_WITHIN = 40.0
"""How many seconds --force waits for a reap, which takes half a minute at most."""

_POLL_SECONDS = 0.5
"""The time between two looks whether frames have ended."""

Unconfirmed = Mapping[str, tuple[str, str]]
"""The frames (ids) that could not be confirmed dead, each with its host and address, and the reason."""

force_option = click.option(
    "--force",
    is_flag=True,
    help="Have a worker reap now instead of within 30 s, which ends what ran on hosts that are DOWN.",
)
reason_option = click.option("--reason", metavar="TEXT", help="Why, for the logs and as a comment.")


@contextmanager
def control(engine: Engine) -> Iterator[tuple[JobControl, Unconfirmed]]:
    """A JobControl that tells the ledger which frames it ends; and the frames that it could not confirm dead, to which
    each of its calls adds."""
    # These import grpc, which commands that only read or write PostgreSQL do without.
    from opencue_sched.accounting.caps import make_ledger
    from opencue_sched.jobs.control import JobControl
    from opencue_sched.reports.completion import Releaser
    from opencue_sched.rqd.channels import RqdChannels
    from opencue_sched.rqd.kill import RqdKiller

    settings = get_settings()
    unconfirmed: dict[str, tuple[str, str]] = {}

    def note(frame_id: str, place: str, reason: str) -> None:
        unconfirmed[frame_id] = (place, reason)

    with redis_store() as client, RqdChannels(settings.rqd, full_name=full_names(engine), quiet=True) as channels:
        ledger = make_ledger(engine, client, owner=f"{settings.instance}-cli", accounting=settings.accounting)
        killer = RqdKiller(channels, notify=note)
        yield JobControl(Releaser(engine, settings.release, ledger), killer), unconfirmed


def who_and_why(verb: str, reason: str | None) -> str:
    """A sentence that names the user, machine and reason of a change, for the logs of RQDs and ours."""
    user = current_user() or "a user without a name"
    return f"{verb} by {user} on {socket.gethostname()}" + (f": {reason}" if reason else "")


def settle(
    engine: Engine, job: NamedRow, result: FramesChanged, unconfirmed: Unconfirmed, *, force: bool
) -> tuple[FramesChanged, list[dict[str, Any]]]:
    """Say on standard error what the database refused, which frames of a result may still run, and what becomes of
    those on silent hosts. Returns the result and the silent hosts, as documents.

    With ``force`` a worker reaps now. In the result that is returned, the frames that the reap ended are changed and no
    longer deferred: they wait again, whatever the call should have made of them.
    """
    if result.refusal is not None:
        from opencue_sched.clients.store_errors import describe

        click.echo(f"error: {job.name}: {describe(result.refusal)}", err=True)
    if not result.deferred:
        return result, []
    with engine.connect() as connection:
        names = {frame.id: frame.name for frame in jobs.frames_of(connection, job.id, states=[FrameState.RUNNING])}
        silent = silent_hosts(connection, get_settings(), jobs.job_of(connection, job.id))
    deferred = sorted((names.get(frame_id, frame_id), *unconfirmed[frame_id]) for frame_id in result.deferred)
    count = plural(len(deferred), "frame")
    click.echo(f"{job.name}: {count} could not be confirmed dead and may still run:", err=True)
    for frame_name, place, reason in deferred:
        click.echo(f"  {frame_name} on {place}: {reason}", err=True)
    for host in silent:
        click.echo(f"  {host.words}", err=True)
    hosts = [asdict(host) for host in silent]
    if not force:
        return result, hosts
    if not any(host.state == HardwareState.DOWN for host in silent):
        click.echo("  --force changes nothing: the reaper would end none of them yet", err=True)
        return result, hosts
    left = _reap(engine, result.deferred)
    ended = [frame for frame in result.deferred if frame not in left]
    return replace(result, changed=(*result.changed, *ended), deferred=tuple(left)), hosts


def _reap(engine: Engine, frame_ids: Sequence[str]) -> list[str]:
    """Have a worker reap, and wait for that. Returns the frames (ids) whose runs have not ended.

    This machine does not reap, because perhaps it cannot reach RQDs that a worker can, and what it cannot reach may be
    alive.
    """
    from opencue_sched.celery import app

    def running() -> set[tuple[str, str]]:
        with engine.connect() as connection:
            return {(proc.frame_id, proc.id) for proc in list_procs(connection, frame_ids=frame_ids)}

    before = left = running()
    until = time.monotonic() + REAPED_WITHIN
    with working("waiting for a worker to reap"):
        app.send_task("opencue_sched.maintenance.reap", expires=REAPED_WITHIN)
        while left and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)
            left = before & running()
    if left:
        click.echo("  what is left was not ended; does a worker run? `opencue-sched fleet` says", err=True)
    return sorted(frame for frame, _ in left)
