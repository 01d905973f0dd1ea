"""``python -m benchmarks``: one command, one table, JSON on request."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import click

from benchmarks.accounting import main as accounting
from benchmarks.figures import console, show, write_json


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
def cli() -> None:
    """Benchmarks on the production path.

    Example: python -m benchmarks stress --workers 2 --json stress.json
    """


@cli.command()
@click.option("--workers", default=1, show_default=True, help="Celery workers.")
@click.option("--scale", default=1.0, show_default=True, help="Size of both farms; 1 is OpenCue's own stress suite.")
@click.option("--database-url", help="Use this database (empty, ours, or Cuebot's) instead of one from a wheel.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
def stress(workers: int, scale: float, database_url: str | None, json_path: Path | None) -> None:
    """Drain 6,000 frames onto 1,200 hosts, then saturate tight bursts; audit after each.

    Exit status 1 if a phase falls short or the audit fails.

    Example: python -m benchmarks stress --workers 2
    """
    from benchmarks.stress import ENVIRONMENT, run_stress
    from benchmarks.workbench import workbench

    with workbench(ENVIRONMENT, database_url=database_url) as bench:
        results = [result.as_dict() for result in run_stress(bench, workers=workers, scale=scale, console=console)]
    show(results, "stress")
    write_json(json_path, results)
    if not all(result["passed"] for result in results):
        sys.exit(1)


@cli.command()
@click.option("--minutes", default=5.0, show_default=True, help="For how long things are broken.")
@click.option("--workers", default=4, show_default=True, help="Celery workers.")
@click.option("--seed", default=1, show_default=True, help="Which faults, and in which order.")
@click.option("--json", "json_path", type=click.Path(path_type=Path), help="Also write the figures here.")
@click.option("--logs", type=click.Path(path_type=Path), help="Keep the logs of all processes in this directory.")
def chaos(minutes: float, workers: int, seed: int, json_path: Path | None, logs: Path | None) -> None:
    """Kill, freeze and cut off everything under load; count bookings above a cap, lost frames, double results.

    Exit status 1 if there is any.

    Example: python -m benchmarks chaos --minutes 5 --workers 4
    """
    import structlog

    from benchmarks.chaos.figures import show_chaos
    from benchmarks.chaos.run import run_chaos

    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    report = run_chaos(seconds=60 * minutes, workers=workers, seed=seed, console=console, logs=logs)
    show_chaos(report)
    write_json(json_path, report.as_dict())
    if not report.passed:
        sys.exit(1)


cli.add_command(accounting, "accounting")

if __name__ == "__main__":
    cli()
