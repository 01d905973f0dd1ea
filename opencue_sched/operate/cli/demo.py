"""``opencue-sched demo``."""

from __future__ import annotations

from pathlib import Path

import click
from rich.console import Console

from opencue_sched.domain.errors import SchedulerError


@click.command("demo")
@click.option("--frames", default=48, show_default=True, type=click.IntRange(1, 999), help="Frames of the animation.")
@click.option("--hosts", default=3, show_default=True, type=click.IntRange(1, 20), help="Real RQD processes.")
@click.option("--workers", default=2, show_default=True, type=click.IntRange(1, 8), help="Celery workers.")
@click.option("--keep", is_flag=True, help="Leave the farm up until Ctrl-C.")
@click.option(
    "--output", type=click.Path(path_type=Path, file_okay=False), default=Path("demo-output"), show_default=True
)
def command(frames: int, hosts: int, workers: int, keep: bool, output: Path) -> None:
    """Render a real job on real RQDs, on this machine.

    Starts PostgreSQL and Redis from wheels on free ports, three real RQDs, the report service, two workers, beat and
    Flower; submits an animation and a contact sheet that depends on it; ends with the audit. Everything it started is
    stopped at the end, on failure and on Ctrl-C.

    Example: opencue-sched demo --keep
    """
    try:
        from opencue_sched.embedded.demo.run import DemoOptions, run_demo
    except ImportError as error:
        raise SchedulerError(f"the demo needs opencue-sched with its extra 'demo'; {error.name} is missing") from error
    options = DemoOptions(frames=frames, hosts=hosts, workers=workers, keep=keep, output=output)
    raise click.exceptions.Exit(run_demo(options, Console()))
