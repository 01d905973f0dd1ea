"""``opencue-sched host`` and ``proc``: hosts, and what runs on them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import click
from sqlalchemy import Connection, Engine, Row

from opencue_sched.cli.chosen_jobs import commenting
from opencue_sched.cli.comments import add_comment_command, comments_column
from opencue_sched.cli.deferred import control, force_option, reason_option, settle, who_and_why
from opencue_sched.cli.inputs import (
    ALLOCATION,
    HOST,
    JOB,
    SHOW,
    Commands,
    ask_first,
    current_user,
    most_option,
    new_name,
)
from opencue_sched.cli.output import HIGH, LOW, NAME, Column, Columns, Done, age_text, in_cores, working
from opencue_sched.clients.postgres import ask
from opencue_sched.domain.clusters import ClusterKind, normalise_tag
from opencue_sched.domain.names import plural
from opencue_sched.domain.states import HardwareState, LockState, ThreadMode
from opencue_sched.domain.units import memory_text
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import get_settings
from opencue_sched.store import hosts, procs
from opencue_sched.store.comments import add_comment
from opencue_sched.store.limits import list_holders
from opencue_sched.store.named_rows import NamedRow, id_of
from opencue_sched.store.reports import lock_cores

_THREAD_MODES = {mode.value: mode.name for mode in ThreadMode}
_COLUMNS = Columns(
    Column("host", "Host", importance=NAME),
    Column("id"),
    Column("state", "State", importance=HIGH),
    Column("lock", "Lock", importance=HIGH),
    Column("lock_source"),
    Column("allocation", "Alloc"),
    Column("facility"),
    Column("idle_cores", "Idle Cores", in_cores("idle_centicores"), importance=HIGH),
    Column("cores", "Cores", in_cores("centicores"), importance=HIGH),
    Column("idle_memory_kb", "Idle Mem", show=memory_text),
    Column("free_memory_kb", show=memory_text),
    Column("memory_kb", "Mem", show=memory_text),
    Column("idle_gpus", "Idle GPUs"),
    Column("gpus", "GPUs"),
    Column("idle_gpu_memory_kb", show=memory_text),
    Column("gpu_memory_kb", show=memory_text),
    Column(
        "rqd_locked_cores", "RQD Locked", in_cores("locked_centicores"), lambda cores: f"{cores:g}" if cores else ""
    ),
    Column("frames", "Frames", importance=HIGH),
    Column("load", "Load", show=lambda hundredths: f"{hundredths / 100:g}", importance=LOW),
    Column("nimby", "NIMBY", importance=LOW),
    Column("os", "OS", importance=LOW),
    Column("thread_mode", "Thread", lambda host: _THREAD_MODES.get(host.thread_mode, host.thread_mode), importance=LOW),
    Column("pinged", "Ping", show=age_text, importance=HIGH),
    Column("booted"),
    Column("tags", "Tags", show=" ".join, wraps=True),
)
_PROC_COLUMNS = Columns(
    Column("host", "Host", importance=HIGH),
    *map(Column, ("id", "frame", "memory_kb", "used_memory_kb", "local", "layer")),
    Column("job", "Job", importance=NAME),
    Column("", "Frame", lambda proc: proc.frame or "(being unbooked)", importance=HIGH),
    Column("cores", "Cores", in_cores("centicores")),
    Column("", "Memory", lambda proc: f"{memory_text(proc.used_memory_kb)} / {memory_text(proc.memory_kb)}"),
    Column("gpus", "GPUs"),
    Column("dispatched", "Start", importance=LOW),
    Column("", "Runtime", "dispatched", age_text),
    Column("show", "Show", importance=LOW),
    Column("pinged", "Ping", show=age_text, importance=LOW),
    Column("", "Proc", "id", importance=LOW),
)

_HOSTS = click.argument("chosen", type=HOST, nargs=-1, required=True)
_HOST = click.argument("host", type=HOST)
_TAGS = click.argument("words", nargs=-1, required=True, metavar="TAG...")


host_command = Commands("host")


@host_command.in_transaction("list --tag gpu --lock OPEN --state UP")
@click.option("--alloc", type=ALLOCATION, help="Only of this allocation.")
@click.option("--lock", type=click.Choice([lock.value for lock in LockState], case_sensitive=False))
@click.option("--state", type=click.Choice([state.value for state in HardwareState], case_sensitive=False))
@click.option("--tag", metavar="TAG", help="Only with this tag.")
@click.option("--name", "part", metavar="PART", help="Only with this in their name.")
@most_option(1000)
def list_hosts(
    connection: Connection, alloc: NamedRow | None, tag: str | None, most: int, **wanted: str | None
) -> Done:
    """List hosts with what is idle on them. Ping is how long ago the last report came."""
    tags = None if tag is None else [tag]
    found = hosts.list_hosts(connection, alloc_id=id_of(alloc), tags=tags, **wanted, most=most + 1)
    return _COLUMNS.listed(found, most=most)


@host_command.in_transaction("info render01")
@_HOST
def info(connection: Connection, host: NamedRow) -> Done:
    """Show one host and what runs on it."""
    (row,) = hosts.list_hosts(connection, host_ids=[host.id])
    columns = _COLUMNS.and_also(comments_column(connection, "host", host.id))
    held = list_holders(connection, host_id=host.id)
    columns = columns.and_also(Column("limits", read=lambda _: [limit.limit for limit in held], show=", ".join))
    return columns.shown(row, "procs", hosts.list_procs(connection, host_id=host.id), _PROC_COLUMNS)


@host_command.on_farm("lock render01 render02")
@_HOSTS
@click.option("--reason", metavar="TEXT", help="Why, as a comment of the hosts.")
def lock(engine: Engine, chosen: list[NamedRow], reason: str | None) -> Done:
    """Lock hosts: nothing more is booked on them; what runs goes on. Their RQDs are told, as Cuebot does."""
    ids, source = [host.id for host in chosen], current_user() or "opencue-sched"
    with engine.begin() as connection:
        open_to_others = [LockState.OPEN, LockState.NIMBY_LOCKED]
        hosts.set_lock(connection, ids, old=open_to_others, new=LockState.LOCKED, source=source)
        # What the RQD alone had locked would open again with its lock.
        hosts.set_lock(
            connection,
            ids,
            old=[LockState.LOCKED],
            old_source=hosts.RQD_LOCK_SOURCE,
            new=LockState.LOCKED,
            source=source,
        )
        if reason:
            message = who_and_why("locked", reason)
            add_comment(connection, "host", ids, user=source, subject="locked", message=message)
    _tell_locked(engine, chosen, "LockAll", "nothing of this scheduler is booked there all the same")
    return _COLUMNS.listed(ask(engine, hosts.list_hosts, host_ids=ids))


@host_command.on_farm("unlock render01")
@_HOSTS
def unlock(engine: Engine, chosen: list[NamedRow]) -> Done:
    """Open locked hosts. Their RQDs are told: one whose cores are locked there would be locked again by its next
    report. One that its user took back (NIMBY_LOCKED) opens by itself when the user is gone."""
    ids, source = [host.id for host in chosen], current_user() or "opencue-sched"
    # First the RQDs, or a report on its way locks the hosts again.
    _tell_locked(engine, chosen, "UnlockAll", "if its cores are locked there, its next report locks it again")
    with engine.begin() as connection:
        hosts.set_lock(connection, ids, old=[LockState.LOCKED], new=LockState.OPEN, source=source)
        # Where a Cuebot has taken over the reports, none says that they are not locked any more.
        for host_id in ids:
            lock_cores(connection, host_id, 0)
    return _COLUMNS.listed(ask(engine, hosts.list_hosts, host_ids=ids))


def _tell_locked(engine: Engine, chosen: Sequence[NamedRow], call: str, otherwise: str) -> None:
    """Have RQDs lock or unlock all their cores, side by side; those that could not be told are named."""
    from opencue_sched.rqd.channels import RqdChannels, tell
    from opencue_sched.rqd.kill import RqdKiller

    settings = get_settings()
    if settings.rqd.dry_run_mode:
        return
    with RqdChannels(settings.rqd, full_name=hosts.full_names(engine), quiet=True) as channels:
        killer = RqdKiller(channels)

        def told(name: str) -> str:
            return killer.silence(name, settings.rqd.timeout) or tell(channels, name, call)

        names = [host.name for host in chosen]
        for name, why in zip(names, channels.each(told, names), strict=True):
            if why:
                click.echo(f"note: the RQD of {name} was not told: {why}; {otherwise}", err=True)


add_comment_command(host_command, HOST, "host", 'comment render01 "the fan is broken, ticket 4711"')
tags = Commands("host tags", "Add or remove manual tags.")
host_command.add_command(tags)


@tags.in_transaction("add render01 bigmem ssd")
@_HOST
@_TAGS
def add(connection: Connection, host: NamedRow, words: tuple[str, ...]) -> Done:
    """Give a host manual tags."""
    wanted = [new_name("tag", word) for word in words]
    hosts.set_tags(connection, [host.id], ClusterKind.MANUAL, add=wanted, drop=[])
    return _COLUMNS.changed(*hosts.list_hosts(connection, host_ids=[host.id]))


@tags.in_transaction("remove render01 bigmem")
@_HOST
@_TAGS
def remove(connection: Connection, host: NamedRow, words: tuple[str, ...]) -> Done:
    """Take manual tags from a host."""
    hosts.set_tags(connection, [host.id], ClusterKind.MANUAL, drop=words)
    now = _COLUMNS.changed(*hosts.list_hosts(connection, host_ids=[host.id]))
    there = frozenset(map(normalise_tag, now.document["tags"]))
    if left := [word for word in words if normalise_tag(word) in there]:
        why = "its allocation, its RQD or its name gives it"
        raise InvalidInput(f"tag {left[0]} of {host.name} is not a manual one, {why}; nothing was removed")
    return now


@host_command.in_transaction("move render01 render02 local.desktop")
@_HOSTS
@click.argument("target", type=ALLOCATION)
@click.option("--force", is_flag=True, help="Even while frames run there; they count for the new allocation then.")
def move(connection: Connection, chosen: list[NamedRow], target: NamedRow, force: bool) -> Done:
    """Put hosts into another allocation."""
    ids = [host.id for host in chosen]
    procs.lock_hosts(connection, ids)
    running = sum(row.frames for row in hosts.list_hosts(connection, host_ids=ids))
    if running and not force:
        raise InvalidInput(f"frames running there: {running}; lock the hosts and wait, or use --force")
    hosts.move_hosts(connection, ids, target.id)
    return _COLUMNS.listed(hosts.list_hosts(connection, host_ids=ids))


@host_command.in_transaction("delete render01")
@_HOST
def delete(connection: Connection, host: NamedRow) -> Done:
    """Delete a host that is down and runs nothing. It comes back when its RQD reports again."""
    procs.lock_hosts(connection, [host.id])
    (row,) = hosts.list_hosts(connection, host_ids=[host.id])
    if row.state != HardwareState.DOWN:
        raise InvalidInput(f"{host.name} is {row.state}; only a host that is DOWN can be deleted: end its RQD and wait")
    if row.frames:
        raise InvalidInput(f"frames of {host.name} that are not released yet: {row.frames}")
    hosts.delete_host(connection, host.id)
    return Done(f"deleted {host.name}", {"host": host.name, "id": host.id})


def _power_command(verb: str, call: str, does: str, done: str) -> None:
    """Add a command that has RQDs end or reboot their hosts. ``call`` is that of RQD, without Now or Idle."""
    said = f"{does}\n\nExit status 1 if an RQD refused or did not answer; of that host nothing is changed."

    @host_command.on_farm(f"{verb} render01 render02", does=said)
    @_HOSTS
    @click.option("--now", is_flag=True, help="Not when they are idle: what runs there is killed, to run again.")
    @click.option("--yes", is_flag=True, help="Do not ask before --now.")
    def power(engine: Engine, chosen: list[NamedRow], now: bool, yes: bool) -> Done:
        from opencue_sched.rqd.channels import RqdChannels, tell
        from opencue_sched.rqd.kill import RqdKiller

        settings = get_settings()
        failed: dict[str, str] = {}
        found = ask(engine, hosts.list_hosts, host_ids=[host.id for host in chosen])
        running = sum(host.frames for host in found)
        if now and running and not yes:
            names = ", ".join(host.host for host in found)
            ask_first(f"Kill {plural(running, 'running frame')} on {names}, to run again elsewhere?")
        with RqdChannels(settings.rqd, full_name=hosts.full_names(engine), quiet=True) as channels:
            for host in found:
                if silence := RqdKiller(channels).silence(host.host, settings.rqd.timeout):
                    failed[host.host] = f"its RQD {silence}; nothing is changed"
                    continue
                # First of all nothing more is booked there. As Cuebot does it, but a host that cannot be told stays as
                # it is: one that is called DOWN has its frames given away.
                _prepare(engine, host, verb, now=now)
                if why := tell(channels, host.host, call + ("Now" if now else "Idle")):
                    _prepare(engine, host, verb, now=now, back=True)
                    failed[host.host] = f"its RQD refused: {why}"
        told = [host.host for host in found if host.host not in failed]
        when = "now" if now else "when idle"
        lines = [f"{name}: {done} {when}" for name in told]
        failures = [f"{name}: {why}" for name, why in failed.items()]
        return Done(lines, {verb: told, "when": when, "failed": failed}, failures, status=1 if failed else 0)


_power_command(
    "reboot", "Reboot", "Have hosts reboot when they are idle. Until they have, nothing is booked on them.", "reboots"
)
_power_command(
    "down",
    "ShutdownRqd",
    "Lock hosts and have their RQDs end when they are idle. Where a service starts RQD again, it comes back locked.",
    "is locked, its RQD ends",
)


def _prepare(engine: Engine, host: Row[Any], verb: str, *, now: bool, back: bool = False) -> None:
    """Keep bookings off a host that is to reboot or to go down, or let it be as it was."""
    with engine.begin() as connection:
        if verb == "reboot":
            aim = HardwareState.REBOOTING if now else HardwareState.REBOOT_WHEN_IDLE
            new = HardwareState(host.state) if back else aim
            hosts.set_state(connection, host.id, old=list(HardwareState), new=new)
        elif back:
            source = host.lock_source or ""
            hosts.set_lock(connection, [host.id], old=[LockState.LOCKED], new=host.lock, source=source)
        else:
            source = current_user() or "opencue-sched"
            hosts.set_lock(connection, [host.id], old=list(LockState), new=LockState.LOCKED, source=source)


_PLACES = (
    click.Option(["--host", "host_id"], type=HOST, help="Only of this host."),
    click.Option(["--job", "job_id"], type=JOB, help="Only of this job."),
    click.Option(["--show", "show_id"], type=SHOW, help="Only of this show."),
    click.Option(["--alloc", "alloc_id"], type=ALLOCATION, help="Only of this allocation."),
)


def _ids(places: dict[str, NamedRow | None]) -> dict[str, Any]:
    """The ids of the rows that options name, by the options' parameters; without those that are not given."""
    return {key: row.id for key, row in places.items() if row is not None}


proc_command = Commands("proc")


@proc_command.in_transaction("list --job demo-sh010-alice_comp_v001", params=_PLACES)
@most_option(1000)
def list_procs(connection: Connection, most: int, **places: NamedRow | None) -> Done:
    """List procs, the oldest first. Memory is used / reserved, Ping is how long ago a report last named it."""
    return _PROC_COLUMNS.listed(hosts.list_procs(connection, **_ids(places), most=most + 1), "proc", most)


@proc_command.on_farm('kill --host render01 --reason "fan is broken"', params=_PLACES)
@click.argument("proc_ids", nargs=-1, metavar="[PROC...]")
@click.option("--yes", is_flag=True, help="Do not ask.")
@reason_option
@force_option
def kill(
    engine: Engine,
    proc_ids: tuple[str, ...],
    yes: bool,
    reason: str | None,
    force: bool,
    **places: NamedRow | None,
) -> Done:
    """Kill what runs, by the ids of procs, or all of a host, job, show or allocation. The frames wait again.

    Exit status 1 if a frame could not be confirmed dead, or the database refused to end it; it stays as it is then.
    """
    if not proc_ids and not any(places.values()):
        raise click.UsageError("name procs, or a --host, --job, --show or --alloc")
    chosen = ask(engine, hosts.list_procs, proc_ids=proc_ids or None, **_ids(places))
    if unknown := set(proc_ids) - {proc.id for proc in chosen}:
        raise InvalidInput(f"no such proc runs there: {', '.join(sorted(unknown))}; see: opencue-sched proc list")
    by_job: dict[NamedRow, list[str]] = defaultdict(list)
    for proc in chosen:
        if proc.frame is not None and not proc.local:  # the others are ended by the reaper, and by Cuebot
            by_job[NamedRow(proc.job_id, proc.job)].append(proc.frame_id)
    if not by_job:
        raise InvalidInput("nothing runs there")
    number = sum(map(len, by_job.values()))
    if not yes:
        ask_first(f"Kill {plural(number, 'frame')} of {plural(len(by_job), 'job')}?")
    results = []
    with control(engine) as (jobs_control, unconfirmed):
        for job, frames in by_job.items():
            with working(f"killing frames of {job.name}, and confirming that they are dead"):
                note = commenting(job.id, "killed", reason)
                result = jobs_control.kill_frames(frames, reason=who_and_why("killed", reason), note=note)
            results.append(settle(engine, job, result, unconfirmed, force=force))
    killed = [frame for ended, _ in results for frame in ended.changed]
    deferred = [frame for ended, _ in results for frame in ended.deferred]
    silent = [host for _, of_job in results for host in of_job]
    document = {"killed": killed, "deferred": deferred, "silent_hosts": silent}
    incomplete = any(ended.deferred or ended.refusal for ended, _ in results)
    return Done(f"{plural(len(killed), 'frame')} killed and waiting again", document, status=int(incomplete))
