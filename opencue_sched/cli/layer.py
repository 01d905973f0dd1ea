"""``opencue-sched layer``: what the frames of a job's layers need, while the job runs."""

from __future__ import annotations

from typing import Any

import click
from sqlalchemy import Connection

from opencue_sched.cli import output
from opencue_sched.cli.checks import last_verdicts
from opencue_sched.cli.inputs import CommandRefused, choose, choose_all, complete_job, farm, layer_ids
from opencue_sched.cli.job import layer_columns_of
from opencue_sched.cli.output import json_option, json_row, memory_text, show_rows
from opencue_sched.domain.cluster import join_tags
from opencue_sched.domain.farm import CENTICORES_PER_CORE, LAYER_TAGS_WIDTH, JobState
from opencue_sched.farm.job_file import layer_fields
from opencue_sched.insight.explain import unserved
from opencue_sched.settings import get_settings
from opencue_sched.store import jobs
from opencue_sched.store.shows import Kind


@click.group("layer")
def command() -> None:
    """List the layers of a job, and change what their frames need. A layer is named by its job and its name.

    Example: opencue-sched layer set demo-sh010-alice_comp_v001 render --memory 16GiB
    """


@command.command("list")
@click.argument("name", metavar="JOB", shell_complete=complete_job)
@json_option
def list_(name: str, as_json: bool) -> None:
    """List the layers of a job: counts, needs, limits, and the last verdict on them.

    Example: opencue-sched layer list demo-sh010-alice_comp_v001
    """
    with farm() as (engine, _), engine.connect() as connection:
        job = choose(connection, Kind.JOB, name)
        found = jobs.layers_of(connection, job.id)
    show_rows(found, layer_columns_of(last_verdicts(job.id)), as_json=as_json)


@command.command("set")
@click.argument("name", metavar="JOB", shell_complete=complete_job)
@click.argument("layers", nargs=-1, required=True, metavar="LAYER...")
@click.option("--cores", type=float, metavar="CORES", help="The least; 0 is the whole host, -2 all but two.")
@click.option("--max-cores", type=float, metavar="CORES", help="The most of a frame; 0 is no bound.")
@click.option("--threadable/--no-threadable", default=None, help="Whether its frames thread.")
@click.option("--memory", metavar="SIZE", help="Such as 512MiB or 16GiB.")
@click.option("--optimize/--no-optimize", default=None, help="Whether its memory may be lowered to what frames used.")
@click.option("--gpus", type=int, metavar="GPUS")
@click.option("--gpu-memory", metavar="SIZE", help="Such as 8GiB.")
@click.option("--tags", metavar="TAG,TAG", help="In place of those it has.")
@click.option("--timeout", type=int, metavar="MINUTES", help="The longest a frame runs; 0 is for ever.")
@click.option("--timeout-llu", type=int, metavar="MINUTES", help="The longest without a log line; 0 is for ever.")
@click.option("--add-limit", "add", multiple=True, metavar="LIMIT", help="Also under this limit. May be given again.")
@click.option("--drop-limit", "drop", multiple=True, metavar="LIMIT", help="No longer under this limit.")
@json_option
def set_(
    name: str, layers: tuple[str, ...], add: tuple[str, ...], drop: tuple[str, ...], as_json: bool, **given: Any
) -> None:
    """Change layers of a job, also while it runs: frames that start from now on. What runs keeps what it has.

    Values are those of a job file, and are written as Cuebot writes them. What the farm cannot serve is noted.

    Example: opencue-sched layer set demo-sh010-alice_comp_v001 render --cores 8 --memory 16GiB --add-limit arnold
    """
    given = {key: value for key, value in given.items() if value is not None}
    if not given and not add and not drop:
        raise click.UsageError("say what to change; see --help")
    optimize = {key: given.pop(key) for key in ("optimize",) if key in given}
    fields = layer_fields(given) | optimize
    if "tags" in fields:
        fields["tags"] = join_tags(fields["tags"])
        if len(fields["tags"]) > LAYER_TAGS_WIDTH:
            raise CommandRefused(f"tags: {LAYER_TAGS_WIDTH} characters are the most OpenCue stores")
    with farm() as (engine, _):
        with engine.begin() as connection:
            job = choose(connection, Kind.JOB, name)
            chosen = layer_ids(connection, job, layers) or []
            limits = [[row.id for row in choose_all(connection, Kind.LIMIT, names)] for names in (add, drop)]
            jobs.set_layers(connection, chosen, fields, add_limits=limits[0], drop_limits=limits[1])
            found = [row for row in jobs.layers_of(connection, job.id) if row.id in chosen]
            _check(found)
        with engine.connect() as connection:
            notes = _notes(connection, job.id, found)
    if as_json:
        rows = [json_row(row, layer_columns_of({})) for row in found]
        output.show_json({"job": job.name, "layers": rows, "notes": notes})
        return
    for row in found:
        click.echo(f"{job.name} {row.name}: {_needs(row)}")
    for note in notes:
        click.echo(f"note: {note}", err=True)


def _check(layers: list[jobs.LayerView]) -> None:
    """Raises CommandRefused for what does not go together; the transaction is rolled back then."""
    for layer in layers:
        if 0 < layer.cores_max < layer.cores_min:
            raise CommandRefused(f"layer {layer.name}: its max cores would be less than its cores")
        if layer.threadable and 0 < layer.cores_min < CENTICORES_PER_CORE:
            raise CommandRefused(f"layer {layer.name}: less than one core cannot thread; say --no-threadable")


def _notes(connection: Connection, job_id: str, layers: list[jobs.LayerView]) -> list[str]:
    (job,) = jobs.list_jobs(connection, job_id=job_id)
    notes = unserved(connection, job_id, get_settings())
    for layer in layers:
        for what, asked, most in (
            ("cores", layer.cores_min / CENTICORES_PER_CORE, job.max_centicores / CENTICORES_PER_CORE),
            ("gpus", layer.gpus, job.max_gpus),
        ):
            if 0 < most < asked:
                hint = f"`opencue-sched job max-{what}` raises that"
                notes.append(
                    f"layer {layer.name}: a frame takes more {what} than the {most:g} the job may have; {hint}"
                )
    if job.state == JobState.FINISHED:
        notes.append("the job is finished; `opencue-sched job retry` makes it run again")
    return notes


def _needs(layer: jobs.LayerView) -> str:
    """``8 cores, 16.0G, 1 GPU, tags general | gpu, limits arnold, time-out 90 min``."""
    number = layer.cores_min / CENTICORES_PER_CORE
    cores = f"{number:g} core{'' if number == 1 else 's'}"
    if layer.cores_max > 0:
        cores += f" ({layer.cores_max / CENTICORES_PER_CORE:g} at most)"
    said = [cores, memory_text(layer.memory_kb)]
    if layer.gpus or layer.gpu_memory_kb:
        said.append(f"{output.counted(layer.gpus, 'GPU')} with {memory_text(layer.gpu_memory_kb)}")
    said.append(f"tags {layer.tags}")
    said += [f"limits {', '.join(layer.limits)}"] if layer.limits else []
    said += [f"time-out {layer.timeout_minutes} min"] if layer.timeout_minutes else []
    said += [f"{layer.timeout_llu_minutes} min without a log line"] if layer.timeout_llu_minutes else []
    return ", ".join(said)
