"""The ``opencue-sched`` command.

It starts fast: this module imports click and nothing else that is large. A command's module is imported when the
command is asked for, and what only a failure needs, when something failed.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
from contextlib import suppress

import click

from opencue_sched import __version__
from opencue_sched.errors import StoreAway
from opencue_sched.signals import end_by_sigterm_as_first_process
from opencue_sched.standard_streams import cannot_be_written, drop_output, open_closed_streams

COMMANDS = {
    "alloc": ("show", "List, create and change allocations: pools of hosts, found by a tag."),
    "audit": ("checks", "Check the invariants against PostgreSQL and Redis."),
    "board": ("ctl", "List, show, trash and restore cluster postings."),
    "ctl": ("ctl", "Pause, resume, drain and stop workers; let a cluster sleep."),
    "demo": ("services", "Render a real job on real RQDs, on this machine."),
    "dispatch": ("ctl", "Dispatch one cluster now, and wait for the result if asked to."),
    "doctor": ("checks", "Say whether everything a scheduler needs is there."),
    "explain": ("checks", "Say why a job's frames are waiting."),
    "fleet": ("checks", "Show who is alive, who leads, and what waits."),
    "folder": ("show", "List, create and cap folders of shows (Cuebot's groups), and move jobs."),
    "host": ("host", "List, lock, unlock, tag and move hosts."),
    "job": ("job", "List, show and manage jobs."),
    "layer": ("job", "List layers of a job, and change what their frames need."),
    "limit": ("limit", "List, create and change limits: how many frames, or machines, may run under a name."),
    "migrate": ("services", "Create or upgrade the database schema."),
    "proc": ("host", "List procs (a frame's share of a host while it runs), and kill them."),
    "report-service": ("services", "Run the service that RQDs report to."),
    "service": ("service", "List, create and change services: what frames run, and what that needs."),
    "show": ("show", "List, create and change shows."),
    "submit": ("submit", "Submit a job file."),
    "subscription": ("show", "List, create and change subscriptions: what a show may use of an allocation."),
    "top": ("top", "Watch the farm: cores, shows, workers, and why jobs wait."),
}
"""The module that each command is in, as ``{name}_command`` or ``command``, and what it does."""


class _Lazy(click.Group):
    """Imports a command's module when the command is run, or asked for its help. The list of commands and their
    completion have placeholders."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name, command, rest = super().resolve_command(ctx, args)
        if name is not None:
            # What an import makes stays: the collector would spend a quarter of a short command on walking it.
            gc.disable()
            module = importlib.import_module(f"{__name__}.{COMMANDS[name][0]}")
            gc.freeze()
            gc.enable()
            command = getattr(module, f"{name.replace('-', '_')}_command", None) or module.command
        return name, command, rest


_PLACEHOLDERS = {name: click.Command(name, short_help=does) for name, (_, does) in COMMANDS.items()}


@click.group(cls=_Lazy, commands=_PLACEHOLDERS, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="opencue-sched")
@click.pass_context
def cli(context: click.Context) -> None:
    """A frame scheduler for OpenCue farms.

    The database and Redis come from OPENCUE_SCHED_DATABASE_URL and OPENCUE_SCHED_REDIS_URL, or from the file named by
    OPENCUE_SCHED_CONFIG. Workers, beats and Flower are Celery's: `celery -A opencue_sched worker`.

    Exit status: 0 done; 1 refused or failed, with the reason on standard error; 2 wrong usage; 75 a store that does
    not answer or takes no writes now, where report-service or migrate needs it; 78 wrong configuration, or a database
    to migrate first; 130 stopped by Ctrl-C.

    Example: opencue-sched audit --json
    """
    from opencue_sched.cli.output import log_warnings
    from opencue_sched.settings import unknown_variables

    log_warnings()
    if context.invoked_subcommand != "report-service":  # it warns of them in its log, which is JSON
        for name in unknown_variables(os.environ):
            click.echo(f"warning: {name} is no setting and has no effect", err=True)


def main() -> None:
    """Entry point. The exit statuses are those that ``--help`` lists."""
    end_by_sigterm_as_first_process()
    open_closed_streams()
    try:
        _run()
    except OSError as error:
        if not cannot_be_written(error):
            raise
        with suppress(OSError):  # standard error may be full, too
            click.echo(f"error: cannot write the output: {error.strerror}", err=True)
        drop_output()
        sys.exit(1)


def _run() -> None:
    """Run the command, and end the process with its exit status unless that is 0. An error with words for people is
    printed in these; any other is raised."""
    try:
        status = cli(prog_name="opencue-sched", standalone_mode=False)
        if isinstance(status, int) and status:
            sys.exit(status)  # click answers an Exit with its status instead of raising it
    except click.exceptions.Abort:
        click.echo("stopped", err=True)
        sys.exit(130)
    except click.ClickException as error:
        error.show()
        sys.exit(error.exit_code)
    except Exception as error:
        from opencue_sched.insight.health import failure_lines, is_wrong_configuration

        problems = failure_lines(error) or _not_text(error)
        if not problems:
            raise
        for problem in problems:
            click.echo(f"error: {problem}", err=True)
        if isinstance(error, StoreAway):
            sys.exit(os.EX_TEMPFAIL)
        sys.exit(os.EX_CONFIG if is_wrong_configuration(error) else 1)


def _not_text(error: Exception) -> list[str]:
    """What is wrong with arguments that are not UTF-8, when something failed that had to write them so."""
    if not isinstance(error, UnicodeEncodeError):
        return []
    return [f"argument {word!r} is not UTF-8" for word in sys.argv if not word.isascii() and _with_surrogates(word)]


def _with_surrogates(word: str) -> bool:
    """Whether Python found bytes in an argument that are no text."""
    return any("\udc80" <= character <= "\udcff" for character in word)
