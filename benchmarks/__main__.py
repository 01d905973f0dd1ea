"""``python -m benchmarks``: one command, one table, JSON on request."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from typing import Any

import click

from benchmarks.accounting import main as accounting
from benchmarks.figures import console, show, write_json
from opencue_sched.embedded.servers.services import POSTGRES_VARIABLE

SCALE_PARTS = ("drain", "steady", "rounds", "large", "plan")
POSITIVE = click.IntRange(min=1)
RECOVERY_PARTS = ("events", "passes", "stores", "takeover")


def _counts(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    """``"1,2,4"`` as numbers."""
    try:
        counts = [int(count) for count in text.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < 1:
        raise click.BadParameter(f"{text!r} is not numbers of workers with commas, such as 1,2,4")
    return counts


def _run_programs(_: click.Context, __: click.Parameter, directory: Path | None) -> None:
    """Have every PostgreSQL of this run, and of the processes it starts, be the one in the directory."""
    if directory is not None:
        os.environ[POSTGRES_VARIABLE] = str(directory.resolve())


postgres = click.option(
    "--postgres",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    expose_value=False,
    callback=_run_programs,
    help="Run the PostgreSQL whose programs are here (/usr/lib/postgresql/15/bin) instead of the wheel's.",
)


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Benchmarks on the production path.

    Example: python -m benchmarks stress --workers 2 --json stress.json
    """


@cli.command()
@click.option("--workers", default=1, show_default=True, help="Celery workers.")
@click.option("--scale", default=1.0, show_default=True, help="Size of both farms; 1 is OpenCue's own stress suite.")
@click.option("--database-url", help="Use this database (empty, ours, or Cuebot's) instead of one from a wheel.")
@click.option("--base", help="By turns also with the workers and beat of this commit, taken out of git.")
@postgres
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def stress(workers: int, scale: float, database_url: str | None, base: str | None, json_path: Path | None) -> None:
    """Drain 6,000 frames onto 1,200 hosts, then saturate tight bursts; audit after each.

    With --base the farms of earlier runs in the database are deleted before each.

    Exit status 1 if a phase falls short or the audit fails.

    Example: python -m benchmarks stress --workers 2
    """
    from benchmarks.stress import run_by_turns

    found = run_by_turns(workers=workers, scale=scale, database_url=database_url, base=base, console=console)
    results = [result.as_dict() for result in found]
    show(results, "stress")
    write_json(json_path, results)
    if not all(result["passed"] for result in results):
        sys.exit(1)


@cli.command()
@click.option(
    "--workers",
    default="1,2,4",
    show_default=True,
    callback=_counts,
    help="Celery workers, several numbers with commas.",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    type=click.Choice(SCALE_PARTS),
    default=("drain",),
    show_default=True,
    help="May be given several times.",
)
@click.option("--steady", is_flag=True, help="The same as --part steady.")
@click.option("--rate", default=200.0, show_default=True, help="steady: frames that end in a second.")
@click.option("--seconds", default=25.0, show_default=True, help="steady, rounds, large: how long each is watched.")
@click.option(
    "--hosts", type=POSITIVE, help="steady: hosts of the farm, 1,553 if not given; large: of the largest, 100,000."
)
@click.option("--frames", type=POSITIVE, help="steady: frames that wait at the hand-over; what lasts if not given.")
@click.option("--layers", type=POSITIVE, help="steady: layers that they are in; so many that each has 40 if not given.")
@click.option("--base", help="steady: by turns also with the workers and beat of this commit, taken out of git.")
@click.option("--rounds", type=POSITIVE, help="drain, steady, plan: times it is done; 3, 1 and 7 if not given.")
@click.option("--scale", default=1.0, show_default=True, help="drain: size of the farm; 1 is OpenCue's stress suite.")
@click.option("--database-url", help="drain: a database (empty, ours, or Cuebot's) instead of one from a wheel.")
@postgres
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def scale(
    workers: list[int],
    parts: tuple[str, ...],
    steady: bool,
    rate: float,
    seconds: float,
    hosts: int | None,
    frames: int | None,
    layers: int | None,
    base: str | None,
    rounds: int | None,
    scale: float,
    database_url: str | None,
    json_path: Path | None,
) -> None:
    """What another worker adds, and how many bookings workers lose to each other.

    \b
    drain   6,000 frames onto 1,200 empty hosts
    steady  five shows on one farm: the fill from empty to 99 %, then the full farm with frames ending
    rounds  20,000 frames on 1,553 hosts, as fifty layers and as one
    large   what size costs: idle farms of 10,000 to 100,000 hosts with the first frame of a start, new jobs, memory;
            a frame on farms of 1,200 and 10,000 hosts with 6,000 and 200,000 waiting; the fill of 10,000 hosts and
            the full farm. All sizes go with --hosts
    plan    1,000 frames on 10,000 hosts with 20,000 waiting layers, in memory: processor time of a plan

    Exit status 1 if a drain or a fill falls short, an audit fails, two workers waste more than 5 % of a drain, more
    than 3 % of the bookings of anything else are lost, one layer fills the farm more than a fifth slower than fifty, a
    plan takes more than 100 ms of the processor by the median, a new job has more than 1,000 rows read, or a frame
    takes more than 1.2 times as many rows or bytes of WAL on the largest farm as on the smallest.

    Example: python -m benchmarks scale --steady --workers 1,4 --frames 1000000 --layers 20000
    """
    import structlog

    if layers and (frames is None or frames < layers):
        raise click.UsageError("--layers needs --frames, and each layer a frame")

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    parts = ("steady",) if steady else parts
    figures: dict[str, list[dict[str, Any]]] = {}
    if "drain" in parts:
        from benchmarks.scale import run_scale

        drains = run_scale(workers, rounds=rounds or 3, scale=scale, database_url=database_url, console=console)
        figures["drain"] = [result.as_dict() for result in drains]
    if "steady" in parts:
        from benchmarks.steady import Size, run_steady

        found = run_steady(
            workers,
            rate=rate,
            seconds=seconds,
            console=console,
            size=Size(hosts or Size().hosts, frames, layers),
            base=base,
            rounds=rounds or 1,
        )
        figures["steady"] = [result.as_dict() for result in found]
    if "rounds" in parts:
        from benchmarks.fills import run_rounds

        figures["rounds"] = [it.as_dict() for it in run_rounds(workers, seconds=seconds, console=console)]
    if "large" in parts:
        figures |= _large(workers, hosts=hosts, rate=rate, seconds=seconds)
    if "plan" in parts:
        from benchmarks.plans import run_plans

        figures["plan"] = [result.as_dict() for result in run_plans(rounds=rounds or 7, console=console)]
    for part, results in figures.items():
        show(results, f"scale: {part}")
    write_json(json_path, figures if len(figures) > 1 else next(iter(figures.values())))
    if not all(result["passed"] for results in figures.values() for result in results):
        sys.exit(1)


def _large(workers: list[int], *, hosts: int | None, rate: float, seconds: float) -> dict[str, list[dict[str, Any]]]:
    from benchmarks.figures import columns
    from benchmarks.sizes import MOST_HOSTS, run_growth, run_idle_farms
    from benchmarks.steady import Size, run_steady

    most = hosts or MOST_HOSTS
    full = run_steady(workers, rate=rate, seconds=seconds, console=console, size=Size(most // 10))
    return {
        "large, idle": columns(run_idle_farms(workers, most_hosts=most, seconds=seconds, console=console)),
        "large, growth": columns(run_growth(workers, most_hosts=most, console=console)),
        "large, full": [result.as_dict() for result in full],
    }


@cli.command()
@click.option("--minutes", default=5.0, show_default=True, help="For how long things are broken.")
@click.option("--workers", default=4, show_default=True, help="Celery workers.")
@click.option("--seed", default=1, show_default=True, help="Which faults, and in which order.")
@postgres
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep the logs of all processes in this directory.")
def chaos(minutes: float, workers: int, seed: int, json_path: Path | None, logs: Path | None) -> None:
    """Kill, freeze and cut off everything under load; count bookings above a cap, lost frames, double results.

    Exit status 1 if there is any.

    Example: python -m benchmarks chaos --minutes 5 --workers 4
    """
    import structlog

    from benchmarks.chaos.figures import show_chaos
    from benchmarks.chaos.run import Plan, run_chaos

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    report = run_chaos(Plan(seconds=60 * minutes, workers=workers, seed=seed, logs=logs), console)
    show_chaos(report)
    write_json(json_path, report.as_dict())
    if not report.passed:
        sys.exit(1)


@cli.command()
@click.option("--rounds", default=50, show_default=True, help="Waits measured for each question.")
@click.option(
    "--workers", default="1,2", show_default=True, callback=_counts, help="Celery workers, several numbers with commas."
)
@postgres
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def latency(rounds: int, workers: list[int], json_path: Path | None) -> None:
    """How long a new job waits on an idle farm, and a freed core for its next frame; defaults, simulated RQDs.

    Exit status 1 unless every median is at most 150 ms and every 99th percentile at most 600 ms.

    Example: python -m benchmarks latency --rounds 50
    """
    from benchmarks.latency import run_latency

    results = [it.as_dict() for count in workers for it in run_latency(workers=count, rounds=rounds, console=console)]
    show(results, "latency")
    write_json(json_path, results)
    if not all(result["passed"] for result in results):
        sys.exit(1)


@cli.command()
@click.option("--clusters", default=200, show_default=True, help="Clusters (shows x allocations); a multiple of ten.")
@click.option("--seconds", default=30.0, show_default=True, help="How long each load is watched.")
@postgres
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def idle(clusters: int, seconds: float, json_path: Path | None) -> None:
    """What clusters without work cost, and clusters whose work nobody can take; beat and one worker at defaults.

    Example: python -m benchmarks idle --clusters 200
    """
    from benchmarks.idle import run_idle

    results = [it.as_dict() for it in run_idle(clusters=clusters, seconds=seconds, console=console)]
    show(results, "idle")
    write_json(json_path, results)


@cli.command()
@click.option(
    "--part", "parts", multiple=True, type=click.Choice(RECOVERY_PARTS), default=RECOVERY_PARTS, show_default=True
)
@click.option("--rounds", default=3, show_default=True, help="Times each fault is made.")
@postgres
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def recovery(parts: tuple[str, ...], rounds: int, json_path: Path | None) -> None:
    """How long each failure takes to be put right, settings as shipped.

    The parts: what is announced by events, what a recompute finds (four minutes of waiting), stores that go away, and
    workers and leading beats that are killed.

    Example: python -m benchmarks recovery --part events
    """
    import structlog

    from benchmarks.figures import columns
    from benchmarks.recovery import run_recovery

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    results = columns(run_recovery(parts, rounds=rounds, console=console))
    show(results, "recovery")
    write_json(json_path, results)


@cli.command()
@click.option("--hosts", default=1200, show_default=True, help="RQDs, each with a connection of its own.")
@click.option("--rounds", default=3, show_default=True, help="Times that every question is asked.")
@click.option("--base", help="By turns also with the service of this commit, taken out of git.")
@postgres
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def reports(hosts: int, rounds: int, base: str | None, json_path: Path | None) -> None:
    """What one report service carries: status reports and completions, each alone and both, of many connected RQDs.

    Example: python -m benchmarks reports --hosts 1200
    """
    from benchmarks.figures import columns
    from benchmarks.reports import run_reports

    results = columns(run_reports(hosts=hosts, rounds=rounds, base=base, console=console))
    of_base = [row for row in results if base and row["phase"].endswith(base)]
    show([row for row in results if row not in of_base], "reports")
    if of_base:
        show(of_base, f"reports, {base}")
    write_json(json_path, results)


@cli.command()
@click.option(
    "--workers", default="1,4", show_default=True, callback=_counts, help="Celery workers, several numbers with commas."
)
@click.option("--scenario", "names", multiple=True, help="Only this scenario; several with the option repeated.")
@click.option("--pace", default=1.0, show_default=True, help="Times as long in all, for a busy machine.")
@click.option("--controls/--no-controls", default=True, show_default=True, help="Also with each policy off.")
@postgres
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep the logs of all processes in this directory.")
def decisions(
    workers: list[int],
    names: tuple[str, ...],
    pace: float,
    controls: bool,
    json_path: Path | None,
    logs: Path | None,
) -> None:
    """Whether shares, priority, wide frames, GPUs, caps and the like are decided as the policies say.

    Each scenario is one farm under a certain load, judged by figures; its control is the same with the policy off, and
    must not keep them. Exit status 1 if a scenario fails, or a control does not.

    Example: python -m benchmarks decisions --workers 1,4 --scenario shares-two
    """
    import structlog

    from benchmarks.decisions.run import chosen, run_decisions, show_answers
    from benchmarks.decisions.scenarios import SCENARIOS

    unknown = sorted(set(names) - {scenario.name for scenario in SCENARIOS})
    if unknown:
        known = ", ".join(scenario.name for scenario in SCENARIOS)
        raise click.BadParameter(f"{', '.join(unknown)}; there are {known}", param_hint="--scenario")
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    answers = run_decisions(chosen(names), workers, console, controls=controls, pace=pace, logs=logs)
    show_answers(answers)
    write_json(json_path, [answer.as_dict() for answer in answers])
    if not all(answer.right for answer in answers):
        sys.exit(1)


cli.add_command(postgres(accounting), "accounting")

if __name__ == "__main__":
    cli()
