"""``opencue-sched show``, ``folder``, ``alloc`` and ``subscription``: shows, and what they may use."""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import date
from typing import Any

import click
from sqlalchemy import Connection, Engine, Row

from opencue_sched.cli.history import Day, report
from opencue_sched.cli.inputs import (
    ALLOCATION,
    JOB,
    NEGATIVE_NUMBERS,
    SHOW,
    Commands,
    Number,
    WholeNumber,
    core_cap,
    core_count,
    gpu_cap,
    new_name,
    redis_store,
)
from opencue_sched.cli.output import HIGH, LOW, NAME, Column, Columns, Done, cap_text, cores, counting_down, in_cores
from opencue_sched.clients.postgres import ask
from opencue_sched.domain.names import near, plural
from opencue_sched.domain.units import CENTICORES_PER_CORE, INT_MAX
from opencue_sched.errors import InvalidInput
from opencue_sched.settings import get_settings
from opencue_sched.store import folders, named_rows, shows, submit
from opencue_sched.store.hosts import list_hosts, move_hosts
from opencue_sched.store.insight import host_groups
from opencue_sched.store.jobs import list_jobs
from opencue_sched.store.named_rows import Kind, NamedRow, id_of
from opencue_sched.store.procs import lock_hosts
from opencue_sched.store.schema import read_origin

_SHOW_COLUMNS = Columns(
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
    Column("default_min_cores", "Min Cores", in_cores("default_min_cores"), importance=LOW),
    Column("default_max_cores", "Max Cores", in_cores("default_max_cores"), cap_text, LOW),
)
_ALLOCATION_COLUMNS = Columns(
    Column("allocation", "Allocation", "name", importance=NAME),
    Column("id"),
    Column("tag", "Tag"),
    Column("facility", "Facility", importance=LOW),
    Column("running_cores", "Running Cores", "booked"),
    Column("idle_cores", "Idle Cores", "idle"),
    Column("cores", "Cores"),
    Column("hosts", "Hosts"),
    Column("locked", "Locked", "hosts_locked"),
    Column("down", "Down", "hosts_down"),
    Column("default", "Default"),
)
_SUBSCRIPTION_COLUMNS = Columns(
    Column("show", "Show", importance=NAME),
    Column("allocation", "Allocation", importance=NAME),
    Column("id"),
    Column("size", "Size", in_cores("size_centicores")),
    Column("burst", "Burst", in_cores("burst_centicores")),
    Column("used", "Used", "used_cores"),
    Column("used_gpus"),
    Column(
        "percent",
        "Used %",
        lambda subscription: _percent(subscription.used_cores, subscription.size_centicores),
        "{:.0f}%".format,
    ),
    Column(
        "left",
        "Left",
        lambda subscription: cores(
            max(0, subscription.burst_centicores - subscription.used_cores * CENTICORES_PER_CORE)
        ),
    ),
    Column("running_frames", read="procs"),
)
_FOLDER_COLUMNS = Columns(
    Column("show", "Show", importance=NAME),
    Column("folder", "Folder", "name", importance=NAME),
    Column("id"),
    Column("parent", "In", importance=LOW),
    Column("dept", "Dept", importance=LOW),
    Column("used_cores", "Used", importance=HIGH),
    Column("max_cores", "Max Cores", in_cores("max_centicores"), cap_text, importance=HIGH),
    Column("min_cores", "Min Cores", in_cores("min_centicores"), importance=LOW),
    Column("used_gpus", "GPUs"),
    Column("max_gpus", "Max GPUs", show=cap_text),
    Column("min_gpus", "Min GPUs", importance=LOW),
    Column("jobs", "Jobs"),
    Column("running", "Booked"),
    Column("waiting", "Wait"),
)


def _percent(used_cores: int, size_centicores: int) -> float | None:
    """How much of a size is in use, in percent with two decimals; None for a size of 0."""
    return round(100 * used_cores * CENTICORES_PER_CORE / size_centicores, 2) if size_centicores > 0 else None


_SHOW = click.argument("show", type=SHOW)
_SWITCH = click.Choice(["on", "off"], case_sensitive=False)
_ALLOC = click.argument("alloc", type=ALLOCATION)


show_command = Commands("show")


@show_command.in_transaction("list")
def list_shows(connection: Connection) -> Done:
    """List shows and what they are doing."""
    return _SHOW_COLUMNS.listed(shows.list_shows(connection))


@show_command.in_transaction("info demo")
@_SHOW
def show_info(connection: Connection, show: NamedRow) -> Done:
    """Show one show with its subscriptions."""
    (row,) = shows.list_shows(connection, show.id)
    subscriptions = shows.list_subscriptions(connection, show_id=show.id)
    return _SHOW_COLUMNS.shown(row, "subscriptions", subscriptions, _SUBSCRIPTION_COLUMNS)


@show_command.in_transaction("report --show demo --since 7d --by user")
@click.option("--show", type=SHOW, help="Only of this show.")
@click.option("--since", type=Day(), default="7d", show_default=True, help="A day: 2026-12-24, today, yesterday or 7d.")
@click.option("--by", type=click.Choice(["show", "user", "day"]), default="show", show_default=True)
@click.option("--csv", "as_csv", is_flag=True, help="Print comma-separated values.")
def show_report(connection: Connection, show: NamedRow | None, since: date, by: str, as_csv: bool) -> Done:
    """Sum up what ended since a day: frames and core-hours, of runs that succeeded and of those that failed.

    From OpenCue's history, also of jobs that are gone. A run counts on the day it ended, in local time.
    """
    return report(connection, id_of(show), since, by, as_csv=as_csv)


@show_command.in_transaction("create demo --managed")
@click.argument("name")
@click.option("--managed/--unmanaged", default=None, help="Whether this scheduler books it. Default: without a Cuebot.")
def create_show(connection: Connection, name: str, managed: bool | None) -> Done:
    """Create a show with its root folder.

    Nothing is booked before it has a subscription.
    """
    new_name("show", name)
    managed = managed if managed is not None else read_origin(connection) == "opencue-sched"
    if named_rows.find_rows(connection, Kind.SHOW, [name]):
        raise InvalidInput(f"there is a show {name!r} already")
    made = shows.insert_show(connection, name, managed=managed)
    return _SHOW_COLUMNS.changed(shows.list_shows(connection, made)[0])


def _setting_command(example: str, column: str, kind: Any, does: str) -> None:
    """Add a command that sets a flag or a default of a show."""
    name, typed = example.split()

    @show_command.in_transaction(f"{name} demo {typed}", does=does, context_settings=NEGATIVE_NUMBERS)
    @_SHOW
    @click.argument("value", type=kind, metavar="on|off" if kind is _SWITCH else "CORES")
    def set_show(connection: Connection, show: NamedRow, value: Any) -> Done:
        stored = value == "on" if kind is _SWITCH else value
        shows.set_rows(connection, "show", "pk_show", [show.id], {column: stored})
        return _SHOW_COLUMNS.changed(shows.list_shows(connection, show.id)[0])


_setting_command(
    "active off", "b_active", _SWITCH, "Make a show active or not. If not, it books nothing and takes no jobs."
)
_setting_command(
    "booking off", "b_booking_enabled", _SWITCH, "Let a show's frames be booked or not. What runs goes on."
)
_setting_command("default-min-cores 1", "int_default_min_cores", core_count, "Set the min_cores of jobs without any.")
_setting_command(
    "default-max-cores 200",
    "int_default_max_cores",
    core_cap,
    "Set the max_cores of jobs without any; 0 or -1 is no cap.",
)


@show_command.on_farm("managed demo on")
@_SHOW
@click.argument("state", type=_SWITCH, metavar="on|off")
def managed(engine: Engine, show: NamedRow, state: str) -> Done:
    """Hand a show to this scheduler (on), or back to Cuebot (off).

    On: what runs is imported and the caps are loaded, and the show is booked after 30 s, when every Cuebot knows (at
    once where there is no Cuebot). Off: OpenCue's accounting tables are brought up to date together with the flag, and
    again when all commits are over. Either way it may be interrupted: the workers do what is left.
    """
    from opencue_sched.accounting.caps import make_ledger
    from opencue_sched.accounting.show_handover import CUEBOT_CACHE_SECONDS, hand_back, hand_over

    settings, on = get_settings(), state == "on"
    quarantine = CUEBOT_CACHE_SECONDS if ask(engine, read_origin) == "cuebot" else 0.0
    hand, wait = (hand_over, quarantine) if on else (hand_back, settings.accounting.commit_deadline)
    with redis_store() as client, counting_down(f"handing {show.name} {'over' if on else 'back'}") as sleep:
        ledger = make_ledger(engine, client, owner=f"{settings.instance}-cli", accounting=settings.accounting)
        age = settings.accounting.in_flight_age
        flip = hand(engine, ledger, show.id, wait_seconds=wait, age_seconds=age, sleep=sleep)
    away = "note: Redis is not open for booking yet; the first worker imports what runs before it books"
    answer = _SHOW_COLUMNS.changed(ask(engine, shows.list_shows, show.id)[0])
    return replace(answer, document=answer.document | asdict(flip), notes=[] if flip.store_ready else [away])


_LEAST, _MOST_OF_ALL = "What its jobs should get together.", "The most; 0 or -1 is no cap."
_CAPS = (
    click.Option(["--max-gpus"], type=gpu_cap, metavar="GPUS", help=_MOST_OF_ALL),
    click.Option(["--min-gpus"], type=WholeNumber(0, INT_MAX), metavar="GPUS", help=_LEAST),
    click.Option(["--max-cores"], type=core_cap, metavar="CORES", help=_MOST_OF_ALL),
    click.Option(["--min-cores"], type=core_count, metavar="CORES", help=_LEAST),
)


folder_command = Commands("folder")


@folder_command.in_transaction("list demo")
@click.argument("show", type=SHOW, required=False)
def list_folders(connection: Connection, show: NamedRow | None) -> Done:
    """List folders with their caps and what is used of them. The root of each show comes first.

    Other commands name a folder by its show and its name or id.
    """
    return _FOLDER_COLUMNS.listed(folders.list_folders(connection, id_of(show)), "folder")


@folder_command.in_transaction("create demo lighting --max-cores 200", params=_CAPS, context_settings=NEGATIVE_NUMBERS)
@_SHOW
@click.argument("name")
@click.option("--parent", metavar="FOLDER", help="Below this folder. Default: the show's root.")
def create_folder(connection: Connection, show: NamedRow, name: str, parent: str | None, **caps: int | None) -> Done:
    """Create a folder, with the department of the one it is in."""
    new_name("folder", name)
    above = _folder(connection, show, parent)
    # The schema's triggers make the rows of folder_level and folder_resource.
    row = {"pk_parent_folder": above.id, "pk_show": above.show_id, "pk_dept": above.dept_id, "str_name": name}
    made = shows.insert_row(connection, "folder", **row)
    if made is None:
        raise InvalidInput(f"there is a folder {name!r} in {above.name} already; `folder caps` changes it")
    return _set_caps(connection, show, made, caps)


@folder_command.in_transaction("caps demo lighting --max-cores 200", params=_CAPS, context_settings=NEGATIVE_NUMBERS)
@_SHOW
@click.argument("name", metavar="FOLDER")
def set_caps(connection: Connection, show: NamedRow, name: str, **caps: int | None) -> Done:
    """Set what the jobs of a folder may use together. What runs above a cap goes on."""
    if all(value is None for value in caps.values()):
        raise click.UsageError("say what to set: --max-cores, --max-gpus, --min-cores or --min-gpus")
    return _set_caps(connection, show, _folder(connection, show, name).id, caps)


@folder_command.in_transaction("move demo-sh010-alice_comp_v001 lighting")
@click.argument("chosen", type=JOB, nargs=-1, required=True)
@click.argument("folder")
def move_jobs(connection: Connection, chosen: list[NamedRow], folder: str) -> Done:
    """Move jobs into a folder of their show. They take what it says about priority and caps of its jobs.

    What runs goes along, and counts in the new folder within accounting.recompute_interval_seconds.
    """
    ids, names = [job.id for job in chosen], [job.name for job in chosen]
    of_shows = {NamedRow(job.show_id, job.show) for job in list_jobs(connection, job_ids=ids)}
    if len(of_shows) > 1:
        raise InvalidInput("these jobs are of several shows; a job stays in its show")
    (show,) = of_shows
    row = _folder(connection, show, folder)
    folders.move_jobs(connection, ids, row)
    return Done(f"{', '.join(names)} in folder {row.name} now", {"show": show.name, "folder": row.name, "jobs": names})


def _folder(connection: Connection, show: NamedRow, name: str | None) -> Row[Any]:
    """The folder of a show by name or id; None: its root. Raises InvalidInput for none, and where two match."""
    there = folders.list_folders(connection, show.id)
    found = [row for row in there if name in (row.id, row.name) or (name is None and row.parent is None)]
    if not found:
        hint = near(name or "", [row.name for row in there]) or f"; `folder list {show.name}` shows them"
        raise InvalidInput(f"show {show.name} has no folder {name!r}{hint}")
    if len(found) > 1 and name is not None:
        ids = ", ".join(f"{row.id} (in {row.parent})" for row in found)
        raise InvalidInput(f"show {show.name} has several folders {name!r}; name one by its id: {ids}")
    return found[0]


def _set_caps(connection: Connection, show: NamedRow, folder_id: str, caps: dict[str, int | None]) -> Done:
    """Set the caps that are given."""
    if given := {f"int_{name}": value for name, value in caps.items() if value is not None}:
        shows.set_rows(connection, "folder_resource", "pk_folder", [folder_id], given)
    return _FOLDER_COLUMNS.changed(_folder(connection, show, folder_id))


alloc_command = Commands("alloc")


@alloc_command.in_transaction("list")
def list_allocations(connection: Connection) -> Done:
    """List allocations with their hosts. Idle cores are those of hosts that are up and open, hosts that are silent are
    down."""
    groups = host_groups(connection, None, staleness=get_settings().host_cache.host_staleness_threshold)
    return _ALLOCATION_COLUMNS.listed([group for group in groups if group.name is not None])


@alloc_command.in_transaction("create cloud.gpu --tag gpu --new-facility")
@click.argument("name")
@click.option("--tag", metavar="TAG", help="The tag of its hosts. Default: the name without the facility.")
@click.option("--new-facility", is_flag=True, help="Create the facility as well.")
def create_allocation(connection: Connection, name: str, tag: str | None, new_facility: bool) -> Done:
    """Create an allocation, named FACILITY.NAME as in OpenCue; without FACILITY it is in the default one."""
    before, dot, after = name.partition(".")
    facility, rest = (before, after) if dot else (submit.names(connection)["facility"][0].name, name)
    if new_facility:
        new_name("facility", facility)
        facility_id = shows.insert_row(connection, "facility", str_name=facility)
    else:
        found = named_rows.find_rows(connection, Kind.FACILITY, [facility])
        if facility not in found:
            hint = near(facility, named_rows.similar_names(connection, Kind.FACILITY, facility))
            raise InvalidInput(f"there is no facility {facility!r}: --new-facility makes it{hint}")
        facility_id = found[facility].id
    full_name = new_name("allocation", f"{facility}.{rest}")
    tag = new_name("tag", tag or rest)
    made = shows.insert_row(connection, "alloc", str_name=full_name, str_tag=tag, pk_facility=facility_id)
    if made is None:
        raise InvalidInput(f"there is an allocation {full_name!r} already")
    text = f"created allocation {full_name} of hosts tagged {tag}"
    return Done(text, {"allocation": full_name, "id": made, "tag": tag, "facility": facility})


@alloc_command.in_transaction("tag local.desktop workstation")
@_ALLOC
@click.argument("tag")
def tag_allocation(connection: Connection, alloc: NamedRow, tag: str) -> Done:
    """Give an allocation and its hosts another tag."""
    new_name("tag", tag)
    shows.set_rows(connection, "alloc", "pk_alloc", [alloc.id], {"str_tag": tag})
    hosts = [host.id for host in list_hosts(connection, alloc_id=alloc.id)]
    lock_hosts(connection, hosts)
    move_hosts(connection, hosts, alloc.id)
    text = f"{alloc.name} and {plural(len(hosts), 'host')} of it have the tag {tag}"
    return Done(text, {"allocation": alloc.name, "id": alloc.id, "tag": tag, "hosts": len(hosts)})


subscription_command = Commands("subscription")


@subscription_command.in_transaction("list demo")
@click.argument("show", type=SHOW, required=False)
@click.option("--alloc", type=ALLOCATION, help="Only of this allocation.")
def list_subscriptions(connection: Connection, show: NamedRow | None, alloc: NamedRow | None) -> Done:
    """List subscriptions, or those of one show.

    Used is what runs now, in percent of the size; Left is up to the burst.
    """
    found = shows.list_subscriptions(connection, show_id=id_of(show), alloc_id=id_of(alloc))
    return _SUBSCRIPTION_COLUMNS.listed(found, "subscription")


@subscription_command.in_transaction("create demo local.general 100 150%")
@_SHOW
@_ALLOC
@click.argument("size", type=core_count, metavar="SIZE")
@click.argument("burst", required=False, metavar="[BURST]")
def create_subscription(connection: Connection, show: NamedRow, alloc: NamedRow, size: int, burst: str | None) -> Done:
    """Let a show use an allocation. SIZE is its share, BURST the most it may use: like SIZE unless given, in
    cores or as a percentage of it; 0 books nothing."""
    most = size if burst is None else _burst(burst, size)
    row = {"pk_show": show.id, "pk_alloc": alloc.id, "int_size": size, "int_burst": most}
    if shows.insert_row(connection, "subscription", **row) is None:
        change = "`subscription size` and `subscription burst` change it"
        raise InvalidInput(f"show {show.name} has a subscription for {alloc.name} already; {change}")
    return _SUBSCRIPTION_COLUMNS.changed(_subscription(connection, show, alloc))


@subscription_command.in_transaction("size demo local.general 200")
@_SHOW
@_ALLOC
@click.argument("number", type=core_count, metavar="CORES")
def set_size(connection: Connection, show: NamedRow, alloc: NamedRow, number: int) -> Done:
    """Set the share of an allocation that a show is due."""
    return _set_subscription(connection, show, alloc, "int_size", number)


@subscription_command.in_transaction("burst demo local.general 150%")
@_SHOW
@_ALLOC
@click.argument("number", metavar="CORES|PERCENT%")
def set_burst(connection: Connection, show: NamedRow, alloc: NamedRow, number: str) -> Done:
    """Set the most a show may use of an allocation, in cores or as a percentage of its size."""
    size = _subscription(connection, show, alloc).size_centicores
    return _set_subscription(connection, show, alloc, "int_burst", _burst(number, size))


def _set_subscription(connection: Connection, show: NamedRow, alloc: NamedRow, column: str, value: int) -> Done:
    found = _subscription(connection, show, alloc)
    shows.set_rows(connection, "subscription", "pk_subscription", [found.id], {column: value})
    return _SUBSCRIPTION_COLUMNS.changed(_subscription(connection, show, alloc))


@subscription_command.in_transaction("delete demo local.general")
@_SHOW
@_ALLOC
@click.option("--force", is_flag=True, help="Even while frames run under it; they go on.")
def delete_subscription(connection: Connection, show: NamedRow, alloc: NamedRow, force: bool) -> Done:
    """Take an allocation away from a show."""
    found = _subscription(connection, show, alloc)
    if found.procs and not force:
        running = f"frames of {found.show} running in {found.allocation}: {found.procs}"
        raise InvalidInput(f"{running}; set burst 0 and wait, or use --force")
    shows.delete_rows(connection, "subscription", "pk_subscription", found.id)
    text = f"{found.show} may not use {found.allocation} any more"
    return Done(text, {"show": found.show, "allocation": found.allocation, "id": found.id})


def _subscription(connection: Connection, show: NamedRow, alloc: NamedRow) -> Row[Any]:
    """The subscription of a show for an allocation. Raises InvalidInput where there is none."""
    found = shows.list_subscriptions(connection, show_id=show.id, alloc_id=alloc.id)
    if not found:
        raise InvalidInput(f"show {show.name} has no subscription for {alloc.name}; `subscription create` makes one")
    return found[0]


def _burst(text: str, size: int) -> int:
    """Cores, or a percentage of the size, as centicores."""
    if not text.endswith("%"):
        return core_count(text)
    return round(size * Number(0, 100_000)(text[:-1]) / 100)
