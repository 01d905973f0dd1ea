"""``opencue-sched host``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import click
from sqlalchemy import Connection, Engine, Row

from opencue_sched.cli import output
from opencue_sched.cli.inputs import (
    CommandRefused,
    choose,
    choose_all,
    complete_allocation,
    complete_host,
    current_user,
    farm,
    new_name,
    notify_hosts_changed,
)
from opencue_sched.cli.output import (
    HIGH,
    LOW,
    NAME,
    Column,
    age_text,
    first,
    in_cores,
    json_option,
    json_row,
    memory_text,
    show_json,
    show_report,
    show_rows,
    show_thing,
)
from opencue_sched.domain.farm import HOST_TAG_WIDTH, HardwareState, LockState, TagType, ThreadMode
from opencue_sched.settings import get_settings
from opencue_sched.store import hosts, procs
from opencue_sched.store.shows import Kind, NamedRow

_COLUMNS = (
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
    Column("frames", "Frames", importance=HIGH),
    Column("load", "Load", show=lambda hundredths: f"{hundredths / 100:g}", importance=LOW),
    Column("nimby", "NIMBY", importance=LOW),
    Column("os", "OS", importance=LOW),
    Column("thread_mode", "Thread", lambda host: _thread_mode(host.thread_mode), importance=LOW),
    Column("pinged", "Ping", show=age_text, importance=HIGH),
    Column("booted"),
    Column("tags", "Tags", show=" ".join, wraps=True),
)
PROC_COLUMNS = (
    Column("id"),
    Column("job", "Job", importance=NAME),
    Column("frame"),
    Column("", "Frame", lambda proc: proc.frame or "(being unbooked)", importance=HIGH),
    Column("cores", "Cores", in_cores("centicores")),
    Column("memory_kb"),
    Column("used_memory_kb"),
    Column("", "Memory", lambda proc: f"{memory_text(proc.used_memory_kb)} / {memory_text(proc.memory_kb)}"),
    Column("gpus", "GPUs"),
    Column("dispatched", "Start", importance=LOW),
    Column("", "Runtime", "dispatched", age_text),
    Column("local"),
)
_CALLS = {
    ("reboot", False): "RebootIdle",
    ("reboot", True): "RebootNow",
    ("down", False): "ShutdownRqdIdle",
    ("down", True): "ShutdownRqdNow",
}
_DONE = {"reboot": "reboots", "down": "is locked, its RQD ends"}
_TAG_ORIGIN = {
    TagType.ALLOC.value: "comes with its allocation",
    TagType.HOSTNAME.value: "is its name",
    TagType.HARDWARE.value: "is reported by its RQD",
    TagType.MANUAL.value: "is constant",
}


@click.group("host")
def command() -> None:
    """List, lock, unlock, tag and move hosts. A host is named by its name or its id.

    Example: opencue-sched host list --alloc local.general
    """


@command.command("list")
@click.option("--alloc", metavar="NAME", shell_complete=complete_allocation, help="Only of this allocation.")
@click.option("--lock", type=click.Choice([lock.value for lock in LockState], case_sensitive=False))
@click.option("--state", type=click.Choice([state.value for state in HardwareState], case_sensitive=False))
@click.option("--tag", metavar="TAG", help="Only with this tag.")
@click.option("--name", "part", metavar="PART", help="Only with this in their name.")
@click.option("--most", type=click.IntRange(1), default=1000, show_default=True, help="List no more than this many.")
@json_option
def list_(
    alloc: str | None,
    lock: str | None,
    state: str | None,
    tag: str | None,
    part: str | None,
    most: int,
    as_json: bool,
) -> None:
    """List hosts with what is idle on them. Ping is how long ago the last report came.

    Example: opencue-sched host list --tag gpu --lock OPEN --state UP
    """
    with farm() as (engine, _), engine.connect() as connection:
        alloc_id = None if alloc is None else choose(connection, Kind.ALLOCATION, alloc).id
        found = hosts.list_hosts(
            connection, alloc_id=alloc_id, lock=lock, state=state, tag=tag, part=part, most=most + 1
        )
    show_rows(first(found, most), _COLUMNS, as_json=as_json)


@command.command()
@click.argument("name", metavar="HOST", shell_complete=complete_host)
@json_option
def info(name: str, as_json: bool) -> None:
    """Show one host and what runs on it.

    Example: opencue-sched host info render01
    """
    with farm() as (engine, _), engine.connect() as connection:
        (host,) = hosts.list_hosts(connection, host_ids=[choose(connection, Kind.HOST, name).id])
        running = hosts.list_procs(connection, host_id=host.id)
    if as_json:
        show_json({**json_row(host, _COLUMNS), "procs": [json_row(proc, PROC_COLUMNS) for proc in running]})
        return
    show_thing(host, _COLUMNS)
    if running:
        click.echo()
        show_rows(running, PROC_COLUMNS)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_host)
@json_option
def lock(names: tuple[str, ...], as_json: bool) -> None:
    """Lock hosts: nothing more is booked on them; what runs goes on.

    Example: opencue-sched host lock render01 render02
    """
    _set_lock(names, LockState.LOCKED, [LockState.OPEN, LockState.NIMBY_LOCKED], "locked", as_json=as_json)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_host)
@json_option
def unlock(names: tuple[str, ...], as_json: bool) -> None:
    """Open locked hosts. One that its user took back (NIMBY_LOCKED) opens by itself when the user is gone.

    Example: opencue-sched host unlock render01
    """
    _set_lock(names, LockState.OPEN, [LockState.LOCKED], "open", as_json=as_json)


@command.group()
def tags() -> None:
    """Add or remove manual tags.

    Example: opencue-sched host tags add render01 bigmem
    """


@tags.command()
@click.argument("name", metavar="HOST", shell_complete=complete_host)
@click.argument("words", nargs=-1, required=True, metavar="TAG...")
@json_option
def add(name: str, words: tuple[str, ...], as_json: bool) -> None:
    """Give a host manual tags.

    Example: opencue-sched host tags add render01 bigmem ssd
    """
    wanted = [new_name("tag", word, width=HOST_TAG_WIDTH) for word in words]
    with farm() as (engine, _), engine.begin() as connection:
        host = choose(connection, Kind.HOST, name)
        changed = hosts.add_tags(connection, host.id, wanted)
        tags_now = _tags(connection, host)
    notify_hosts_changed([host.id] if changed else [])
    _say_tags(host, tags_now, as_json=as_json)


@tags.command()
@click.argument("name", metavar="HOST", shell_complete=complete_host)
@click.argument("words", nargs=-1, required=True, metavar="TAG...")
@json_option
def remove(name: str, words: tuple[str, ...], as_json: bool) -> None:
    """Take manual tags from a host.

    Example: opencue-sched host tags remove render01 bigmem
    """
    with farm() as (engine, _), engine.begin() as connection:
        host = choose(connection, Kind.HOST, name)
        changed = hosts.remove_tags(connection, host.id, words)
        for tag, kind in hosts.kinds_of_tags(connection, host.id, words):
            why = _TAG_ORIGIN.get(kind, "is not a manual one")
            raise CommandRefused(f"tag {tag} of {host.name} {why}; nothing was removed")
        tags_now = _tags(connection, host)
    notify_hosts_changed([host.id] if changed else [])
    _say_tags(host, tags_now, "" if changed else " (it had none of those)", as_json=as_json)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_host)
@click.argument("alloc", metavar="ALLOC", shell_complete=complete_allocation)
@click.option("--force", is_flag=True, help="Even while frames run there; they count for the new allocation then.")
@json_option
def move(names: tuple[str, ...], alloc: str, force: bool, as_json: bool) -> None:
    """Put hosts into another allocation.

    Example: opencue-sched host move render01 render02 local.desktop
    """
    with farm() as (engine, _), engine.begin() as connection:
        chosen = choose_all(connection, Kind.HOST, names)
        target = choose(connection, Kind.ALLOCATION, alloc)
        ids = [host.id for host in chosen]
        procs.lock_hosts(connection, ids)
        running = sum(row.frames for row in hosts.list_hosts(connection, host_ids=ids))
        if running and not force:
            raise CommandRefused(f"frames running there: {running}; lock the hosts and wait, or use --force")
        hosts.move_hosts(connection, ids, target.id)
    notify_hosts_changed(ids)
    moved = [host.name for host in chosen]
    output.done(f"{', '.join(moved)} in {target.name} now", as_json=as_json, hosts=moved, allocation=target.name)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_host)
@click.option("--now", is_flag=True, help="Not when they are idle: what runs there is killed, to run again.")
@click.option("--yes", is_flag=True, help="Do not ask before --now.")
@json_option
def reboot(names: tuple[str, ...], now: bool, yes: bool, as_json: bool) -> None:
    """Have hosts reboot when they are idle. Until they have, nothing is booked on them.

    Exit status 1 if an RQD refused or did not answer; of that host nothing is changed.

    Example: opencue-sched host reboot render01 render02
    """
    _power(names, "reboot", now=now, yes=yes, as_json=as_json)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="HOST...", shell_complete=complete_host)
@click.option("--now", is_flag=True, help="Not when they are idle: what runs there is killed, to run again.")
@click.option("--yes", is_flag=True, help="Do not ask before --now.")
@json_option
def down(names: tuple[str, ...], now: bool, yes: bool, as_json: bool) -> None:
    """Lock hosts and have their RQDs end when they are idle. Where a service starts RQD again, it comes back locked.

    Exit status 1 if an RQD refused or did not answer; of that host nothing is changed.

    Example: opencue-sched host down render01 --now
    """
    _power(names, "down", now=now, yes=yes, as_json=as_json)


@command.command()
@click.argument("name", metavar="HOST", shell_complete=complete_host)
@json_option
def delete(name: str, as_json: bool) -> None:
    """Delete a host that is down and runs nothing. It comes back when its RQD reports again.

    Example: opencue-sched host delete render01
    """
    with farm() as (engine, _), engine.begin() as connection:
        host = choose(connection, Kind.HOST, name)
        procs.lock_hosts(connection, [host.id])
        (row,) = hosts.list_hosts(connection, host_ids=[host.id])
        if row.state != HardwareState.DOWN:
            raise CommandRefused(f"{host.name} is {row.state}; only a host that is DOWN can be deleted")
        if row.frames:
            raise CommandRefused(f"frames of {host.name} that are not released yet: {row.frames}")
        hosts.delete_host(connection, host.id)
    notify_hosts_changed([host.id])
    output.done(f"deleted {host.name}", as_json=as_json, host=host.name, id=host.id)


def _power(names: Sequence[str], verb: str, *, now: bool, yes: bool, as_json: bool) -> None:
    from opencue_sched.dispatch.rqd import RqdChannels, RqdKiller, tell

    settings = get_settings()
    told: list[str] = []
    failed: dict[str, str] = {}
    with farm() as (engine, _), RqdChannels(settings.rqd) as channels:
        with engine.connect() as connection:
            ids = [host.id for host in choose_all(connection, Kind.HOST, names)]
            chosen = hosts.list_hosts(connection, host_ids=ids)
        running = sum(host.frames for host in chosen)
        if now and running and not yes:
            named = ", ".join(host.host for host in chosen)
            frames = output.counted(running, "running frame")
            click.confirm(f"Kill {frames} on {named}, to run again elsewhere?", abort=True)
        for host in chosen:
            if not RqdKiller(channels).answers(host.host, settings.rqd.timeout):
                failed[host.host] = f"its RQD ({channels.address(host.host)}) does not answer; nothing is changed"
                continue
            # First of all nothing more is booked there. As Cuebot does it, but a host that cannot be told stays as it
            # is: one that is called DOWN has its frames given away.
            _prepare(engine, host, verb, now=now)
            if why := tell(channels, host.host, _CALLS[verb, now]):
                _prepare(engine, host, verb, now=now, back=True)
                failed[host.host] = f"its RQD refused: {why}"
            else:
                told.append(host.host)
    when = "now" if now else "when idle"
    lines = [f"{name}: {_DONE[verb]} {when}" for name in told]
    output.show_report(lines, {verb: told, "when": when, "failed": failed}, as_json=as_json)
    for name, why in failed.items():
        click.echo(f"{name}: {why}", err=True)
    if failed:
        raise click.exceptions.Exit(1)


def _prepare(engine: Engine, host: Row[Any], verb: str, *, now: bool, back: bool = False) -> None:
    """Keep bookings off a host that is to reboot or to go down, or let it be as it was."""
    with engine.begin() as connection:
        if verb == "reboot":
            aim = HardwareState.REBOOTING if now else HardwareState.REBOOT_WHEN_IDLE
            hosts.set_state(connection, [host.id], HardwareState(host.state) if back else aim)
        elif back:
            source = host.lock_source or ""
            hosts.set_lock(connection, [host.id], old=[LockState.LOCKED], new=host.lock, source=source)
        else:
            source = current_user() or "opencue-sched"
            hosts.set_lock(connection, [host.id], old=list(LockState), new=LockState.LOCKED, source=source)
    notify_hosts_changed([host.id])


def _set_lock(names: Sequence[str], new: LockState, old: Sequence[LockState], word: str, *, as_json: bool) -> None:
    with farm() as (engine, _), engine.begin() as connection:
        chosen = choose_all(connection, Kind.HOST, names)
        changed = hosts.set_lock(
            connection,
            [host.id for host in chosen],
            old=[state.value for state in old],
            new=new.value,
            source=current_user() or "opencue-sched",
        )
        states = {it.id: it.lock for it in hosts.list_hosts(connection, host_ids=[h.id for h in chosen])}
    notify_hosts_changed(changed)
    show_report(
        [f"{it.name} is {word} now" if it.id in changed else f"{it.name} is {states[it.id]}" for it in chosen],
        [{"host": it.name, "id": it.id, "lock": states[it.id], "changed": it.id in changed} for it in chosen],
        as_json=as_json,
    )


def _tags(connection: Connection, host: NamedRow) -> list[str]:
    (row,) = hosts.list_hosts(connection, host_ids=[host.id])
    return list(row.tags)


def _say_tags(host: NamedRow, tags_now: list[str], note: str = "", *, as_json: bool) -> None:
    text = f"{host.name} has the tags {' '.join(tags_now) or 'none'}{note}"
    output.done(text, as_json=as_json, host=host.name, id=host.id, tags=tags_now)


def _thread_mode(number: int) -> str:
    return ThreadMode(number).name if number in list(ThreadMode) else str(number)
