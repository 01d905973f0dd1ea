"""``opencue-sched show``, ``alloc``, ``subscription`` and ``limit``: shows, and what they may use."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click
from sqlalchemy import Connection, Row

from opencue_sched.cli import output
from opencue_sched.cli.inputs import (
    NEGATIVE_NUMBERS,
    CommandRefused,
    UnknownName,
    choose,
    complete_allocation,
    complete_limit,
    complete_show,
    core_cap,
    core_count,
    farm,
    new_name,
    notify_hosts_changed,
    redis_store,
    switch,
)
from opencue_sched.cli.output import (
    HIGH,
    LOW,
    NAME,
    Column,
    counted,
    in_cores,
    json_option,
    json_row,
    show_json,
    show_rows,
    show_thing,
)
from opencue_sched.domain.farm import FACILITY_NAME_WIDTH, INT_MAX, LIMIT_NAME_WIDTH, SHOW_NAME_WIDTH
from opencue_sched.settings import get_settings
from opencue_sched.store import shows
from opencue_sched.store.pending import fetch_limits
from opencue_sched.store.shows import Kind

if TYPE_CHECKING:
    from opencue_sched.accounting.show_handover import Flip

ALLOCATION_NAME_WIDTH = 36
ALLOCATION_TAG_WIDTH = 24

_SHOW_COLUMNS = (
    Column("show", "Show", "name", importance=NAME),
    Column("id"),
    Column("active", "Active"),
    Column("managed", "Managed"),
    Column("booking", "Booking", lambda show: show.booking and show.dispatch),
    Column("paused"),
    Column("reserved_cores", "Reserved Cores", in_cores("centicores")),
    Column("reserved_gpus", read="gpus"),
    Column("running_frames", "Running Frames", importance=HIGH),
    Column("waiting_frames", "Waiting Frames", importance=HIGH),
    Column("pending_jobs", "Pending Jobs"),
    Column("default_min_cores", read=in_cores("default_min_cores")),
    Column("default_max_cores", read=in_cores("default_max_cores")),
)
_ALLOCATION_COLUMNS = (
    Column("allocation", "Allocation", "name", importance=NAME),
    Column("id"),
    Column("tag", "Tag"),
    Column("facility", "Facility", importance=LOW),
    Column("running_cores", "Running Cores", in_cores("booked_centicores")),
    Column("idle_cores", "Idle Cores", in_cores("idle_centicores")),
    Column("cores", "Cores", in_cores("centicores")),
    Column("hosts", "Hosts"),
    Column("locked", "Locked"),
    Column("down", "Down"),
    Column("default", "Default"),
)
_SUBSCRIPTION_COLUMNS = (
    Column("show", "Show", importance=NAME),
    Column("allocation", "Allocation", importance=NAME),
    Column("id"),
    Column("size", "Size", in_cores("size_centicores")),
    Column("burst", "Burst", in_cores("burst_centicores")),
    Column("used", "Used", in_cores("used_centicores")),
    Column("used_gpus"),
    Column("percent", "Used %", lambda it: _percent(it.used_centicores, it.size_centicores), "{:.0f}%".format),
    Column("left", "Left", lambda it: output.cores(max(0, it.burst_centicores - it.used_centicores))),
    Column("running_frames", read="procs"),
    Column("idle_cores", "Idle Cores", in_cores("idle_centicores")),
)
_LIMIT_COLUMNS = (
    Column("limit", "Limit", "name", importance=NAME),
    Column("id"),
    Column("running", "Running"),
    Column("max", "Max", "max_value"),
    Column("left", "Left"),
)


def _percent(used: int, size: int) -> float | None:
    return round(100 * used / size, 2) if size > 0 else None


def _list_command(
    group: click.Group, read: Callable[[Connection], Iterable[Any]], columns: tuple[Column, ...], help_: str
) -> None:
    """Add the command ``list`` of all there are."""

    @group.command("list", help=help_)
    @json_option
    def list_(as_json: bool) -> None:
        with farm() as (engine, _), engine.connect() as connection:
            found = list(read(connection))
        show_rows(found, columns, as_json=as_json)


# ``opencue-sched show``.


@click.group("show")
def show_command() -> None:
    """List, create and change shows.

    Example: opencue-sched show create demo --managed
    """


_list_command(
    show_command,
    shows.list_shows,
    _SHOW_COLUMNS,
    "List shows and what they are doing.\n\nExample: opencue-sched show list",
)


@show_command.command("info")
@click.argument("name", shell_complete=complete_show)
@json_option
def show_info(name: str, as_json: bool) -> None:
    """Show one show with its subscriptions.

    Example: opencue-sched show info demo
    """
    with farm() as (engine, _), engine.connect() as connection:
        (show,) = shows.list_shows(connection, choose(connection, Kind.SHOW, name).id)
        subscriptions = [
            json_row(row, _SUBSCRIPTION_COLUMNS) for row in shows.list_subscriptions(connection, show_id=show.id)
        ]
    if as_json:
        show_json({**json_row(show, _SHOW_COLUMNS), "subscriptions": subscriptions})
        return
    uses = "{allocation} (size {size}, burst {burst}, used {used})".format
    used = ", ".join(uses(**row) for row in subscriptions) or "none: nothing can be booked"
    show_thing(show, _SHOW_COLUMNS, Subscriptions=used)


@show_command.command("create")
@click.argument("name")
@click.option("--managed/--unmanaged", default=None, help="Whether this scheduler books it. Default: without a Cuebot.")
@click.option("--min-cores", type=core_count, metavar="CORES", help="Default of its jobs' min_cores (1).")
@click.option("--max-cores", type=core_cap, metavar="CORES", help="Default of its jobs' max_cores (100).")
@json_option
def create_show(name: str, managed: bool | None, min_cores: int | None, max_cores: int | None, as_json: bool) -> None:
    """Create a show with its root folder.

    Nothing is booked before it has a subscription.

    Example: opencue-sched show create demo --managed --max-cores 200
    """
    new_name("show", name, width=SHOW_NAME_WIDTH)
    with farm() as (engine, facts), engine.begin() as connection:
        if shows.find_row(connection, Kind.SHOW, name) is not None:
            raise CommandRefused(f"there is a show {name!r} already")
        managed = managed if managed is not None else facts.origin == "opencue-sched"
        made = shows.insert_show(connection, name, managed=managed, min_cores=min_cores, max_cores=max_cores)
    text = f"created show {name}" + ("" if managed else ", not managed by this scheduler")
    output.done(text, as_json=as_json, show=name, id=made, managed=managed)


def _set_show(name: str, column: str, value: bool | int, said: str, *, as_json: bool) -> None:
    with farm() as (engine, _), engine.begin() as connection:
        show = choose(connection, Kind.SHOW, name)
        changed = shows.set_show(connection, show.id, column, value)
    key = column.partition("_")[2].removesuffix("_enabled")
    set_to = {key: value if isinstance(value, bool) else output.cores(value)}
    text = said.format(show.name) + ("" if changed else " (it was)")
    output.done(text, as_json=as_json, show=show.name, id=show.id, **set_to, changed=changed)


@show_command.command()
@click.argument("name", shell_complete=complete_show)
@click.argument("state", type=switch, metavar="on|off")
@json_option
def active(name: str, state: bool, as_json: bool) -> None:
    """Make a show active or not. Jobs of a show that is not active are not booked, and none can be submitted.

    Example: opencue-sched show active demo off
    """
    _set_show(name, "b_active", state, f"active of {{}} is {'on' if state else 'off'}", as_json=as_json)


@show_command.command()
@click.argument("name", shell_complete=complete_show)
@click.argument("state", type=switch, metavar="on|off")
@json_option
def booking(name: str, state: bool, as_json: bool) -> None:
    """Let a show's frames be booked or not. What runs goes on.

    Example: opencue-sched show booking demo off
    """
    _set_show(name, "b_booking_enabled", state, f"booking of {{}} is {'on' if state else 'off'}", as_json=as_json)


@show_command.command("default-min-cores")
@click.argument("name", shell_complete=complete_show)
@click.argument("number", type=core_count, metavar="CORES")
@json_option
def default_min_cores(name: str, number: int, as_json: bool) -> None:
    """Set the min_cores of jobs that do not say.

    Example: opencue-sched show default-min-cores demo 1
    """
    said = f"jobs of {{}} have {output.cores(number)} min cores unless they say otherwise"
    _set_show(name, "int_default_min_cores", number, said, as_json=as_json)


@show_command.command("default-max-cores", context_settings=NEGATIVE_NUMBERS)
@click.argument("name", shell_complete=complete_show)
@click.argument("number", type=core_cap, metavar="CORES")
@json_option
def default_max_cores(name: str, number: int, as_json: bool) -> None:
    """Set the max_cores of jobs that do not say; -1 is no cap.

    Example: opencue-sched show default-max-cores demo 200
    """
    cap = "no cap" if number <= 0 else f"{output.cores(number)} max cores"
    _set_show(
        name, "int_default_max_cores", number, f"jobs of {{}} have {cap} unless they say otherwise", as_json=as_json
    )


@show_command.command()
@click.argument("name", shell_complete=complete_show)
@click.argument("state", type=switch, metavar="on|off")
@click.option(
    "--wait",
    type=click.FloatRange(min=0),
    metavar="SECONDS",
    help="Time until every Cuebot knows, or our commits are over.",
)
@json_option
def managed(name: str, state: bool, wait: float | None, as_json: bool) -> None:
    """Hand a show to this scheduler (on), or back to Cuebot (off).

    On: what runs is imported and the caps are loaded, and the show is booked after 30 s, when every Cuebot knows (at
    once where there is no Cuebot). Off: OpenCue's accounting tables are brought up to date together with the flag, and
    again when all commits are over. Either way it may be interrupted: the workers do what is left.

    Example: opencue-sched show managed demo on
    """
    from opencue_sched.accounting.caps import make_ledger
    from opencue_sched.accounting.show_handover import CUEBOT_CACHE_SECONDS, hand_back, hand_over

    settings = get_settings()
    with farm() as (engine, facts), redis_store() as client:
        with engine.connect() as connection:
            show_id, name = choose(connection, Kind.SHOW, name)
        ledger = make_ledger(engine, client, owner=f"{settings.instance}-cli")
        age = settings.accounting.in_flight_age
        if wait is None:
            quarantine = CUEBOT_CACHE_SECONDS if facts.origin == "cuebot" else 0.0
            wait = quarantine if state else settings.accounting.commit_deadline
        with output.working(f"handing {name} {'over' if state else 'back'}"):
            flip = (hand_over if state else hand_back)(engine, ledger, show_id, wait_seconds=wait, age_seconds=age)
        with engine.connect() as connection:
            (show,) = shows.list_shows(connection, show_id)
    text = "\n".join(_flip_lines(name, state, flip, booking=show.booking))
    output.done(text, as_json=as_json, show=name, managed=state, booking=show.booking, **asdict(flip))


def _flip_lines(name: str, state: bool, flip: Flip, *, booking: bool) -> list[str]:
    when = ("any more" if not state else "now") if flip.changed else "already"
    lines = [f"show {name} {'is' if state else 'is not'} managed by this scheduler {when}"]
    if not booking:
        lines.append(f"its booking is off: `opencue-sched show booking {name} on` lets it book")
    if not flip.store_ready:
        lines.append("Redis is not open for booking yet; the first worker imports what runs before it books")
    return lines


# ``opencue-sched alloc``.


@click.group("alloc")
def alloc_command() -> None:
    """List, create and change allocations: pools of hosts, found by a tag.

    Example: opencue-sched alloc create local.desktop --tag desktop
    """


_list_command(
    alloc_command,
    shows.list_allocations,
    _ALLOCATION_COLUMNS,
    "List allocations with their hosts. Idle cores are those of hosts that are up and open.\n\n"
    "Example: opencue-sched alloc list",
)


@alloc_command.command("create")
@click.argument("name")
@click.option("--tag", metavar="TAG", help="The tag of its hosts. Default: the name without the facility.")
@click.option("--facility", metavar="NAME", help="Default: what the name begins with, else the default facility.")
@click.option("--new-facility", is_flag=True, help="Create the facility as well.")
@json_option
def create_allocation(name: str, tag: str | None, facility: str | None, new_facility: bool, as_json: bool) -> None:
    """Create an allocation, named FACILITY.NAME as in OpenCue.

    Example: opencue-sched alloc create cloud.gpu --tag gpu --new-facility
    """
    before, dot, rest = name.partition(".")
    with farm() as (engine, _), engine.begin() as connection:
        facility = facility or (before if dot else shows.default_facility(connection))
        if new_facility:
            new_name("facility", facility, width=FACILITY_NAME_WIDTH)
            facility_id = shows.insert_facility(connection, facility)
        else:
            facility_id = choose(connection, Kind.FACILITY, facility).id
        full_name = name if name.startswith(f"{facility}.") else f"{facility}.{name}"
        new_name("allocation", full_name, width=ALLOCATION_NAME_WIDTH)
        tag = new_name("tag", tag or (rest if dot else name), width=ALLOCATION_TAG_WIDTH)
        made = shows.insert_allocation(connection, full_name, tag, facility_id)
        if made is None:
            raise CommandRefused(f"there is an allocation {full_name!r} already")
    text = f"created allocation {full_name} of hosts tagged {tag}"
    output.done(text, as_json=as_json, allocation=full_name, id=made, tag=tag, facility=facility)


@alloc_command.command("tag")
@click.argument("name", shell_complete=complete_allocation)
@click.argument("tag")
@json_option
def tag_allocation(name: str, tag: str, as_json: bool) -> None:
    """Give an allocation and its hosts another tag.

    Example: opencue-sched alloc tag local.desktop workstation
    """
    new_name("tag", tag, width=ALLOCATION_TAG_WIDTH)
    with farm() as (engine, _), engine.begin() as connection:
        alloc = choose(connection, Kind.ALLOCATION, name)
        hosts = shows.set_allocation_tag(connection, alloc.id, tag)
    notify_hosts_changed(hosts)
    text = f"{alloc.name} and {counted(len(hosts), 'host')} of it have the tag {tag}"
    output.done(text, as_json=as_json, allocation=alloc.name, id=alloc.id, tag=tag, hosts=len(hosts))


# ``opencue-sched subscription``.


@click.group("subscription")
def subscription_command() -> None:
    """List, create and change subscriptions: what a show may use of an allocation, in cores.

    Size is what it is promised, burst the most it may use; burst 0 books nothing.

    Example: opencue-sched subscription create demo local.general 100 150
    """


@subscription_command.command("list")
@click.argument("show", required=False, shell_complete=complete_show)
@click.option("--alloc", metavar="NAME", shell_complete=complete_allocation, help="Only of this allocation.")
@json_option
def list_subscriptions(show: str | None, alloc: str | None, as_json: bool) -> None:
    """List subscriptions, or those of one show.

    Used is what runs now, in percent of the size; Left is up to the burst; Idle Cores are what the allocation's hosts
    that are up and open have left.

    Example: opencue-sched subscription list demo
    """
    with farm() as (engine, _), engine.connect() as connection:
        show_id = None if show is None else choose(connection, Kind.SHOW, show).id
        alloc_id = None if alloc is None else choose(connection, Kind.ALLOCATION, alloc).id
        found = shows.list_subscriptions(connection, show_id=show_id, alloc_id=alloc_id)
    show_rows(found, _SUBSCRIPTION_COLUMNS, as_json=as_json, noun="subscription")


@subscription_command.command("create")
@click.argument("show", shell_complete=complete_show)
@click.argument("alloc", shell_complete=complete_allocation)
@click.argument("size", type=core_count, metavar="SIZE")
@click.argument("burst", required=False, metavar="[BURST]")
@json_option
def create_subscription(show: str, alloc: str, size: int, burst: str | None, as_json: bool) -> None:
    """Let a show use an allocation. BURST is like SIZE unless given, in cores or as a percentage of it.

    Example: opencue-sched subscription create demo local.general 100 150%
    """
    most = size if burst is None else _burst(burst, size)
    with farm() as (engine, _), engine.begin() as connection:
        show_id, show = choose(connection, Kind.SHOW, show)
        alloc_id, alloc = choose(connection, Kind.ALLOCATION, alloc)
        if not shows.insert_subscription(connection, show_id, alloc_id, size=size, burst=most):
            raise CommandRefused(f"show {show} has a subscription for {alloc} already")
    caps = {"size": output.cores(size), "burst": output.cores(most)}
    text = f"{show} may use {counted(caps['size'], 'core')} of {alloc}, {caps['burst']} at most"
    output.done(text, as_json=as_json, show=show, allocation=alloc, **caps)
    _note_burst(size, most)


@subscription_command.command("size")
@click.argument("show", shell_complete=complete_show)
@click.argument("alloc", shell_complete=complete_allocation)
@click.argument("number", type=core_count, metavar="CORES")
@json_option
def set_size(show: str, alloc: str, number: int, as_json: bool) -> None:
    """Set what a show is promised of an allocation.

    Example: opencue-sched subscription size demo local.general 200
    """
    with farm() as (engine, _), engine.begin() as connection:
        found = _subscription(connection, show, alloc)
        shows.set_subscription(connection, found.id, size=number)
    cores = output.cores(number)
    text = f"size of {found.show} in {found.allocation} is {counted(cores, 'core')}"
    output.done(text, as_json=as_json, show=found.show, allocation=found.allocation, id=found.id, size=cores)
    _note_burst(number, found.burst_centicores)


@subscription_command.command("burst")
@click.argument("show", shell_complete=complete_show)
@click.argument("alloc", shell_complete=complete_allocation)
@click.argument("number", metavar="CORES|PERCENT%")
@json_option
def set_burst(show: str, alloc: str, number: str, as_json: bool) -> None:
    """Set the most a show may use of an allocation, in cores or as a percentage of its size.

    Example: opencue-sched subscription burst demo local.general 150%
    """
    with farm() as (engine, _), engine.begin() as connection:
        found = _subscription(connection, show, alloc)
        most = _burst(number, found.size_centicores)
        shows.set_subscription(connection, found.id, burst=most)
    cores = output.cores(most)
    text = f"burst of {found.show} in {found.allocation} is {counted(cores, 'core')}"
    output.done(text, as_json=as_json, show=found.show, allocation=found.allocation, id=found.id, burst=cores)
    _note_burst(found.size_centicores, most)
    if most < found.used_centicores:
        used = counted(output.cores(found.used_centicores), "core")
        click.echo(f"note: {used} in use; nothing is booked until fewer are", err=True)


@subscription_command.command("delete")
@click.argument("show", shell_complete=complete_show)
@click.argument("alloc", shell_complete=complete_allocation)
@click.option("--force", is_flag=True, help="Even while frames run under it; they go on.")
@json_option
def delete_subscription(show: str, alloc: str, force: bool, as_json: bool) -> None:
    """Take an allocation away from a show.

    Example: opencue-sched subscription delete demo local.general
    """
    with farm() as (engine, _), engine.begin() as connection:
        found = _subscription(connection, show, alloc)
        if found.procs and not force:
            running = f"frames of {found.show} running in {found.allocation}: {found.procs}"
            raise CommandRefused(f"{running}; set burst 0 and wait, or use --force")
        shows.delete_subscription(connection, found.id)
    text = f"{found.show} may not use {found.allocation} any more"
    output.done(text, as_json=as_json, show=found.show, allocation=found.allocation, id=found.id)


def _subscription(connection: Connection, show: str, alloc: str) -> Row[Any]:
    """The subscription of a show for an allocation, both by name or id. Raises UnknownName where there is none."""
    show_id, show = choose(connection, Kind.SHOW, show)
    alloc_id, alloc = choose(connection, Kind.ALLOCATION, alloc)
    found = shows.list_subscriptions(connection, show_id=show_id, alloc_id=alloc_id)
    if not found:
        raise UnknownName(f"show {show} has no subscription for {alloc}; `subscription create` makes one")
    return found[0]


def _note_burst(size: int, burst: int) -> None:
    """Cuebot allows a burst below the size. 0 is how bookings are stopped; any other is most often a mistake."""
    if 0 < burst < size:
        most, promised = output.cores(burst), output.cores(size)
        click.echo(f"note: the burst is below the size: it gets {most} of its {promised} cores at most", err=True)


def _burst(text: str, size: int) -> int:
    """Cores, or a percentage of the size, as centicores."""
    if not text.endswith("%"):
        return core_count(text)
    try:
        percent = float(text[:-1])
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not a percentage") from error
    if not 0 <= percent <= 100_000:
        raise click.BadParameter(f"{text} is not a percentage of a size")
    return round(size * percent / 100)


# ``opencue-sched limit``.

_FRAMES = click.IntRange(0, INT_MAX)


@click.group("limit")
def limit_command() -> None:
    """List, create and change limits: how many frames may run under a name (licences and the like).

    Example: opencue-sched limit create arnold 20
    """


_list_command(
    limit_command,
    lambda connection: sorted(fetch_limits(connection).values(), key=lambda limit: limit.name),
    _LIMIT_COLUMNS,
    "List limits with the frames that run under each.\n\nExample: opencue-sched limit list",
)


@limit_command.command("create")
@click.argument("name")
@click.argument("most", type=_FRAMES, metavar="MAX")
@json_option
def create_limit(name: str, most: int, as_json: bool) -> None:
    """Create a limit of MAX running frames.

    Example: opencue-sched limit create arnold 20
    """
    new_name("limit", name, width=LIMIT_NAME_WIDTH)
    with farm() as (engine, _), engine.begin() as connection:
        if shows.find_row(connection, Kind.LIMIT, name) is not None:
            raise CommandRefused(f"there is a limit {name!r} already")
        made = shows.insert_limit(connection, name, most)
    output.done(f"created limit {name} of {counted(most, 'frame')}", as_json=as_json, limit=name, id=made, max=most)


@limit_command.command("set")
@click.argument("name", shell_complete=complete_limit)
@click.argument("most", type=_FRAMES, metavar="MAX")
@json_option
def set_limit(name: str, most: int, as_json: bool) -> None:
    """Change how many frames may run under a limit. What runs above it goes on.

    Example: opencue-sched limit set arnold 25
    """
    with farm() as (engine, _), engine.begin() as connection:
        limit_id, name = choose(connection, Kind.LIMIT, name)
        shows.set_limit(connection, limit_id, most)
    text = f"{counted(most, 'frame')} may run under {name}"
    output.done(text, as_json=as_json, limit=name, id=limit_id, max=most)


@limit_command.command("delete")
@click.argument("name", shell_complete=complete_limit)
@click.option("--force", is_flag=True, help="Even while pending jobs have layers under it; they are limited no more.")
@json_option
def delete_limit(name: str, force: bool, as_json: bool) -> None:
    """Delete a limit.

    Example: opencue-sched limit delete arnold
    """
    with farm() as (engine, _), engine.begin() as connection:
        limit_id, name = choose(connection, Kind.LIMIT, name)
        jobs = shows.pending_jobs_under_limit(connection, limit_id)
        if jobs and not force:
            raise CommandRefused(f"{name} holds {counted(jobs, 'pending job')}; --force deletes it all the same")
        shows.delete_limit(connection, limit_id)
    output.done(f"deleted limit {name}", as_json=as_json, limit=name, id=limit_id)
