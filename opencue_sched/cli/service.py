"""``opencue-sched service``: what frames run, and what that needs."""

from __future__ import annotations

from typing import Any

import click
from sqlalchemy import Connection

from opencue_sched.cli.inputs import SERVICE, Commands, new_name
from opencue_sched.cli.output import HIGH, LOW, NAME, Column, Columns, Done, cap_text, in_cores
from opencue_sched.domain.clusters import join_tags
from opencue_sched.domain.units import memory_text
from opencue_sched.errors import InvalidInput
from opencue_sched.store import services
from opencue_sched.store.named_rows import NamedRow
from opencue_sched.store.schema import read_origin

_COLUMNS = Columns(
    Column("service", "Service", "name", importance=NAME),
    Column("id"),
    Column("min_cores", "Cores", in_cores("min_centicores"), importance=HIGH),
    Column("max_cores", "Max Cores", in_cores("max_centicores"), cap_text, LOW),
    Column("threadable", "Threads"),
    Column("memory_kb", "Memory", show=memory_text, importance=HIGH),
    Column("memory_increase_kb", "More Memory", show=memory_text),
    Column("gpus", "GPUs", importance=LOW),
    Column("gpu_memory_kb", "GPU Mem", show=memory_text, importance=LOW),
    Column("tags", "Tags"),
    Column("timeout_minutes", "Timeout", show=cap_text, importance=LOW),
    Column("timeout_llu_minutes", "LLU Timeout", show=cap_text, importance=LOW),
)
_FIELDS = (
    click.Option(["--cores"], type=float, metavar="CORES", help="The least of a frame; 0 is the whole host."),
    click.Option(["--max-cores"], type=float, metavar="CORES", help="The most of a frame; 0 is no bound."),
    click.Option(["--threadable/--no-threadable"], default=None, help="Whether frames thread."),
    click.Option(["--memory"], metavar="SIZE", help="Such as 512MiB or 16GiB."),
    click.Option(["--memory-increase"], metavar="SIZE", help="More for a frame that failed for want of memory."),
    click.Option(["--gpus"], type=int, metavar="GPUS"),
    click.Option(["--gpu-memory"], metavar="SIZE", help="Such as 8GiB."),
    click.Option(["--tags"], metavar="TAG,TAG"),
    click.Option(["--timeout"], type=int, metavar="MINUTES", help="The longest a frame runs; 0 is for ever."),
    click.Option(["--timeout-llu"], type=int, metavar="MINUTES", help="The longest without a log line."),
)

service_command = Commands("service")


@service_command.in_transaction("list")
def list_services(connection: Connection) -> Done:
    """List services: what submitters like PyOutline take for layers that name them, and how memory grows.

    A frame that failed for want of memory asks for More Memory of its first service when it starts again.
    """
    return _COLUMNS.listed(services.list_services(connection))


@service_command.in_transaction("create arnold --memory 16GiB --memory-increase 8GiB --tags general", params=_FIELDS)
@click.argument("name")
def create(connection: Connection, name: str, **given: Any) -> Done:
    """Create a service. What is not said of it is as a layer of a job file has it."""
    _refuse_cuebots(connection)
    new_name("service", name)
    made = services.insert_service(connection, name, _fields(given, everything=True))
    if made is None:
        raise InvalidInput(f"there is a service {name!r} already; `opencue-sched service set` changes it")
    return _COLUMNS.changed(services.list_services(connection, [made])[0])


@service_command.in_transaction("set arnold --memory 24GiB", params=_FIELDS)
@click.argument("service", type=SERVICE)
def set_service(connection: Connection, service: NamedRow, **given: Any) -> Done:
    """Change a service. Layers that are in keep what they have; how memory grows counts from the next failure."""
    _refuse_cuebots(connection)
    fields = _fields(given, everything=False)
    if not fields:
        raise click.UsageError("say what to change; see --help")
    services.set_service(connection, service.id, fields)
    return _COLUMNS.changed(services.list_services(connection, [service.id])[0])


def _refuse_cuebots(connection: Connection) -> None:
    """Refuse a change beside a Cuebot, by InvalidInput: a Cuebot keeps what it once read of services."""
    if read_origin(connection) == "cuebot":
        raise InvalidInput("the services of this farm are its Cuebot's: CueGUI's Services or `cueadmin` change them")


def _fields(given: dict[str, Any], *, everything: bool) -> dict[str, Any]:
    """Fields in the units of the database; of ``everything`` what was not given is a layer's default."""
    from opencue_sched.jobs.job_file import LayerSpec, layer_fields

    said = {key: value for key, value in given.items() if value is not None}
    increase = said.pop("memory_increase", None)
    fields = layer_fields(said)
    if everything:
        defaults = LayerSpec.model_validate({"name": "any", "command": "any", "range": "1"})
        names = set(services.COLUMNS) - {"memory_increase"}
        fields = defaults.model_dump(include=names) | fields
    if increase is not None:
        fields["memory_increase"] = layer_fields({"memory": increase})["memory"]
    if "tags" in fields:
        fields["tags"] = join_tags(fields["tags"])
    return fields
