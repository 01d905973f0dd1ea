"""``opencue-sched folder``: where a show's jobs are, and what those in one place may use together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from sqlalchemy import Connection, Row

from opencue_sched.cli import output
from opencue_sched.cli.inputs import (
    NEGATIVE_NUMBERS,
    CommandRefused,
    UnknownName,
    choose,
    choose_all,
    complete_job,
    complete_show,
    core_cap,
    core_count,
    farm,
    new_name,
)
from opencue_sched.cli.output import HIGH, LOW, NAME, Column, cap_text, in_cores, json_option, json_row, show_rows
from opencue_sched.domain.farm import FOLDER_NAME_WIDTH, INT_MAX, UNLIMITED, near
from opencue_sched.store import shows
from opencue_sched.store.shows import Kind

_COLUMNS = (
    Column("show", "Show", importance=NAME),
    Column("folder", "Folder", "name", importance=NAME),
    Column("id"),
    Column("parent", "In", importance=LOW),
    Column("dept", "Dept", importance=LOW),
    Column("used_cores", "Used", in_cores("used_centicores"), importance=HIGH),
    Column("max_cores", "Max Cores", in_cores("max_centicores"), cap_text, importance=HIGH),
    Column("min_cores", "Min Cores", in_cores("min_centicores"), importance=LOW),
    Column("used_gpus", "GPUs"),
    Column("max_gpus", "Max GPUs", show=cap_text),
    Column("min_gpus"),
    Column("jobs", "Jobs"),
    Column("running", "Booked"),
    Column("waiting", "Wait"),
)
_OPTIONS = {"min_cores": core_count, "max_cores": core_cap, "min_gpus": click.IntRange(0, INT_MAX)}
_OPTIONS["max_gpus"] = click.IntRange(UNLIMITED, INT_MAX)


def _caps(function: Callable[..., None]) -> Callable[..., None]:
    """Options of the four caps."""
    for name, kind in _OPTIONS.items():
        unit = "CORES" if "cores" in name else "GPUS"
        does = "What its jobs should get together." if name.startswith("min") else "The most; 0 or -1 is no cap."
        function = click.option(f"--{name.replace('_', '-')}", name, type=kind, metavar=unit, help=does)(function)
    return function


@click.group("folder")
def command() -> None:
    """List and create folders of shows, cap what their jobs use together, and move jobs into them.

    A folder is named by its show and its name or id. Cuebot calls folders groups.

    Example: opencue-sched folder list demo
    """


@command.command("list")
@click.argument("show", required=False, shell_complete=complete_show)
@json_option
def list_(show: str | None, as_json: bool) -> None:
    """List folders with their caps and what is used of them. The root of each show comes first.

    Example: opencue-sched folder list demo
    """
    with farm() as (engine, _), engine.connect() as connection:
        show_id = None if show is None else choose(connection, Kind.SHOW, show).id
        found = shows.list_folders(connection, show_id)
    show_rows(found, _COLUMNS, as_json=as_json, noun="folder")


@command.command(context_settings=NEGATIVE_NUMBERS)
@click.argument("show", shell_complete=complete_show)
@click.argument("name")
@click.option("--parent", metavar="FOLDER", help="Below this folder. Default: the show's root.")
@_caps
@json_option
def create(show: str, name: str, parent: str | None, as_json: bool, **caps: int | None) -> None:
    """Create a folder, with the department of the one it is in.

    Example: opencue-sched folder create demo lighting --max-cores 200
    """
    new_name("folder", name, width=FOLDER_NAME_WIDTH)
    with farm() as (engine, _), engine.begin() as connection:
        show_id, show = choose(connection, Kind.SHOW, show)
        above = _folder(connection, show_id, show, parent)
        made = shows.insert_folder(connection, name, above)
        if made is None:
            raise CommandRefused(f"there is a folder {name!r} in {above.name} already")
        shows.set_folder_caps(connection, made, _columns(caps))
        row = json_row(_folder(connection, show_id, show, made), _COLUMNS)
    output.done(f"created folder {name} of show {show}, {_words(row)}", as_json=as_json, **row)


@command.command(context_settings=NEGATIVE_NUMBERS)
@click.argument("show", shell_complete=complete_show)
@click.argument("name", metavar="FOLDER")
@_caps
@json_option
def caps(show: str, name: str, as_json: bool, **caps: int | None) -> None:
    """Set what the jobs of a folder may use together. What runs above a cap goes on.

    Example: opencue-sched folder caps demo lighting --max-cores 200 --max-gpus 8
    """
    if all(value is None for value in caps.values()):
        raise click.UsageError("say what to set: --max-cores, --max-gpus, --min-cores or --min-gpus")
    with farm() as (engine, _), engine.begin() as connection:
        show_id, show = choose(connection, Kind.SHOW, show)
        folder_id = _folder(connection, show_id, show, name).id
        shows.set_folder_caps(connection, folder_id, _columns(caps))
        row = json_row(_folder(connection, show_id, show, folder_id), _COLUMNS)
    output.done(f"folder {row['folder']} of show {show}: {_words(row)}", as_json=as_json, **row)
    for what in ("cores", "gpus"):
        if 0 < row[f"max_{what}"] < row[f"used_{what}"]:
            used = f"{row[f'used_{what}']:g} {what}"
            click.echo(f"note: {used} are in use; nothing is booked until fewer are", err=True)


@command.command()
@click.argument("names", nargs=-1, required=True, metavar="JOB...", shell_complete=complete_job)
@click.argument("folder")
@json_option
def move(names: tuple[str, ...], folder: str, as_json: bool) -> None:
    """Move jobs into a folder of their show. They take what it says about priority and caps of its jobs.

    What runs goes along, and counts in the new folder within accounting.recompute_interval_seconds.

    Example: opencue-sched folder move demo-sh010-alice_comp_v001 lighting
    """
    with farm() as (engine, _), engine.begin() as connection:
        chosen = choose_all(connection, Kind.JOB, names)
        ids = [job.id for job in chosen]
        show_ids = shows.shows_of(connection, ids)
        if len(show_ids) > 1:
            raise CommandRefused("these jobs are of several shows; a job stays in its show")
        show = choose(connection, Kind.SHOW, show_ids[0]).name
        row = _folder(connection, show_ids[0], show, folder)
        shows.move_jobs(connection, ids, row.id)
    moved = [job.name for job in chosen]
    output.done(f"{', '.join(moved)} in folder {row.name} now", as_json=as_json, show=show, folder=row.name, jobs=moved)


def _folder(connection: Connection, show_id: str, show: str, name: str | None) -> Row[Any]:
    """The folder of a show by name or id; None: its root. Raises UnknownName, and CommandRefused where two match."""
    there = shows.list_folders(connection, show_id)
    found = [row for row in there if name in (row.id, row.name) or (name is None and row.parent is None)]
    if not found:
        hint = near(name or "", [row.name for row in there])
        raise UnknownName(f"show {show} has no folder {name!r}{hint}")
    if len(found) > 1 and name is not None:
        ids = ", ".join(f"{row.id} (in {row.parent})" for row in found)
        raise CommandRefused(f"show {show} has several folders {name!r}; name one by its id: {ids}")
    return found[0]


def _columns(caps: dict[str, int | None]) -> dict[str, int | None]:
    """The caps by their columns; no cap of GPUs is -1, as Cuebot writes it."""
    return {f"int_{name}": UNLIMITED if (name, value) == ("max_gpus", 0) else value for name, value in caps.items()}


def _words(row: dict[str, Any]) -> str:
    said = [
        f"{row[f'{bound}_{what}']:g} {'GPUs' if what == 'gpus' else what} at {bound_word}"
        for bound, bound_word in (("max", "most"), ("min", "least"))
        for what in ("cores", "gpus")
        if row[f"{bound}_{what}"] > 0
    ]
    return ", ".join(said) or "without a cap"
