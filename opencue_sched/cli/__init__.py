"""The ``opencue-sched`` command. One module per noun; each is imported only when it is asked for."""

from __future__ import annotations

import importlib
import os
import sys

import click
import pydantic
import redis
from sqlalchemy.exc import DBAPIError, OperationalError, SQLAlchemyError

from opencue_sched import __version__
from opencue_sched.cli.output import log_warnings
from opencue_sched.errors import SchedulerError, WrongConfiguration
from opencue_sched.worker.setting_names import setting_problems, unknown_variables

EXIT_FAILED = 1
EXIT_CONFIG = 78

_SERVICES = ("report-service",)
"""They warn of wrong variables in their log, which is JSON."""
_COMMANDS = {
    "alloc": "List, create and change allocations.",
    "audit": "Check the invariants against PostgreSQL and Redis.",
    "board": "List, show, trash and restore cluster postings.",
    "ctl": "Pause, resume, drain and stop workers; let a cluster rest.",
    "demo": "Render a real job on real RQDs, on this machine.",
    "dispatch": "Dispatch one cluster now, and wait for the result if asked to.",
    "doctor": "Say whether everything a scheduler needs is there.",
    "explain": "Say why a job's frames are waiting.",
    "fleet": "Show who is alive, who leads, and what waits.",
    "host": "List, lock, unlock and tag hosts.",
    "job": "List, show and steer jobs.",
    "limit": "List, create and change limits (licences).",
    "migrate": "Create or upgrade the database schema.",
    "report-service": "Run the service that RQDs report to.",
    "show": "List, create and change shows.",
    "submit": "Submit a job file.",
    "subscription": "List, create and change subscriptions.",
}
_SHARED_MODULES = {
    "audit": "checks",
    "doctor": "checks",
    "explain": "checks",
    "demo": "services",
    "migrate": "services",
    "report-service": "services",
}
"""Commands that have no module of their own, and the one that each is in, as ``{name}_command``."""


class _Lazy(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:  # noqa: ARG002 - click's signature
        if name not in _COMMANDS:
            return None
        words = name.replace("-", "_")
        module = importlib.import_module(f"{__name__}.{_SHARED_MODULES.get(name, words)}")
        command: click.Command = getattr(module, f"{words}_command" if name in _SHARED_MODULES else "command")
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        with formatter.section("Commands"):
            formatter.write_dl(sorted(_COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="opencue-sched")
@click.pass_context
def cli(context: click.Context) -> None:
    """A frame scheduler for OpenCue farms.

    The database and Redis come from OPENCUE_SCHED_DATABASE_URL and OPENCUE_SCHED_REDIS_URL, or from the file named by
    OPENCUE_SCHED_CONFIG. Workers, beats and Flower are Celery's: `celery -A opencue_sched worker`.

    Exit status: 0 done; 1 refused or failed, with the reason on standard error; 2 wrong usage; 78 wrong configuration;
    130 stopped by Ctrl-C.

    Example: opencue-sched audit --json
    """
    log_warnings()
    if context.invoked_subcommand not in _SERVICES:
        for unknown in unknown_variables(os.environ):
            click.echo(f"warning: {unknown}", err=True)


def main() -> None:
    """Entry point. The exit statuses are those that ``--help`` tells."""
    try:
        status = cli(standalone_mode=False)
        if isinstance(status, int) and status:
            sys.exit(status)  # click answers an Exit with its status instead of raising it
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except pydantic.ValidationError as error:
        for problem in setting_problems(error):
            click.echo(f"error: {problem}", err=True)
        sys.exit(EXIT_CONFIG)
    except WrongConfiguration as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_CONFIG)
    except SchedulerError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_FAILED)
    except SQLAlchemyError as error:
        reason = str(getattr(error, "orig", None) or error).strip().splitlines()[0]
        connecting = isinstance(error, DBAPIError) and error.statement is None
        hint = " (see OPENCUE_SCHED_DATABASE_URL)" if connecting or isinstance(error, OperationalError) else ""
        click.echo(f"error: PostgreSQL: {reason}{hint}", err=True)
        sys.exit(EXIT_FAILED)
    except redis.RedisError as error:
        click.echo(f"error: Redis: {error} (see OPENCUE_SCHED_REDIS_URL)", err=True)
        sys.exit(EXIT_FAILED)
