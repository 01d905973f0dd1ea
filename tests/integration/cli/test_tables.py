"""Tables through a pseudo-terminal: names are whole, columns go by importance, and it is told which."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import struct
import sys
import tempfile
import termios
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import click
import pytest
import redis

from benchmarks.warm_start import Started
from opencue_sched.cli import cli as program
from opencue_sched.coordination.postings import cluster_postings
from opencue_sched.coordination.presence import Presence
from opencue_sched.domain.clusters import Cluster, ClusterKind
from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.settings import Settings
from tests.kit.command import Cli

JOB = "openmoviefeature-sq0420_sh0110-alexandra.lindqvist_lighting_render_v042"
HOST = "renderblade-0117.farm.stockholm.example.com"
LAYER = "fx_smoke_plume_simulation_hires_beauty"
SHOW = "openmoviefeature"
WIDTHS = (80, 120, 200)
AFTER_EACH = "\x1e"
RUN_ALL = f"""
import json, sys
from opencue_sched.cli import main
for words in json.loads(sys.argv.pop()):
    sys.argv[1:] = words
    try:
        main()
    except SystemExit as ended:
        assert not ended.code, words
    print({AFTER_EACH!r}, flush=True)
"""
LISTS_WITH_ARGUMENTS = (
    ("job", "depends", "list", JOB),
    ("job", "frames", JOB),
    ("subscription", "list", SHOW),
)


def lists(group: click.Group = program, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command ``list`` that needs no argument."""
    context = click.Context(group)
    for name in group.list_commands(context):
        _, command, _ = group.resolve_command(context, [name])
        if isinstance(command, click.Group):
            yield from lists(command, (*words, name))
        elif command is not None and name == "list" and not any(it.required for it in command.params):
            yield (*words, name)


LISTS = (*lists(), *LISTS_WITH_ARGUMENTS)
SHOWN = (*LISTS, ("job", "info", JOB), ("host", "info", HOST), ("fleet",))


@dataclass(frozen=True)
class Seen:
    """A table as it was printed."""

    text: str

    @property
    def titles(self) -> list[str]:
        return re.split(" {2,}", self.text.splitlines()[0])

    @property
    def names(self) -> list[str]:
        """The first cell of each row; a cell that goes on in the next line leaves it empty."""
        rows = self.text.partition("left out: ")[0].splitlines()[1:]
        return [name for row in rows if (name := re.split(" {2,}", row)[0])]

    @property
    def cells(self) -> set[str]:
        return {cell for row in self.text.splitlines() for cell in re.split(" {2,}", row)}

    @property
    def left_out(self) -> list[str]:
        note = " ".join(self.text.partition("left out: ")[2].partition(";")[0].split())
        return note.split(", ") if note else []


def on_terminal(commands: tuple[tuple[str, ...], ...], *, columns: int) -> dict[tuple[str, ...], Seen]:
    """What commands print on a terminal of so many columns, all in one process."""
    screen, terminal = pty.openpty()
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, columns, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    printed = b""
    with tempfile.TemporaryFile() as errors:
        ran = Started(
            [sys.executable, "-c", RUN_ALL, json.dumps(commands)],
            env={**environment, "TERM": "xterm"},
            stdout=terminal,
            stderr=errors,
        )
        os.close(terminal)
        try:
            while part := os.read(screen, 65536):
                printed += part
        except OSError:  # the other end is closed: EIO on Linux
            pass
        finally:
            os.close(screen)
            status = ran.wait(60)
        errors.seek(0)
        assert status == 0, errors.read().decode()
    plain = re.sub(r"\x1b\[[0-9;]*m", "", printed.decode()).replace("\r\n", "\n")
    texts = [text.lstrip("\n") for text in plain.split(AFTER_EACH)]
    return dict(zip(commands, map(Seen, texts), strict=False))


@pytest.fixture
def a_farm(build: Callable[[Callable[[Farm], Any]], Any], redis_client: redis.Redis, settings: Settings) -> None:
    """With names as long as those of a real farm."""

    def make(farm: Farm) -> tuple[str, str]:
        show = farm.show(SHOW)
        alloc = farm.alloc("general")
        farm.subscription(show, alloc, size=120, burst=300)
        farm.limit("arnold_interactive_licence", 20)
        tags = [f"capability-{number}" for number in range(4)]
        host = farm.host(name=HOST, cores=64, memory_gb=256, tags=tags)
        layers = [LayerSpec(name=LAYER, frames=6, cores=1), LayerSpec(name="comp", frames=1)]
        job = farm.job(layers, name=JOB, show=show, priority=50)
        farm.layer_on_layer((job, 1), (job, 0))
        farm.run(job.frames[:2], host, memory_gb=0.5)
        return show.id, farm.facility()

    show_id, facility_id = build(make)
    cluster = Cluster(facility_id, show_id, ClusterKind.MANUAL, ("general", "gpu"))
    cluster_postings(redis_client, settings).enqueue([cluster])
    worker = Presence(redis_client, "cue", types=["dispatch", "sweep"], group="default", instance="w1", capacity=4)
    worker.announce()
    worker.refresh(in_flight=3, work=[f"alloc-{number:016x}" for number in range(8)])


@pytest.mark.parametrize("columns", WIDTHS)
def test_a_table_fits_its_terminal_and_cuts_no_name(cli: Cli, a_farm: None, columns: int) -> None:
    # given what a pipe gets of each list
    whole = {words: Seen(cli(*words).out) for words in LISTS}
    # when a terminal of this width gets it
    seen = on_terminal(LISTS, columns=columns)
    for words, piped in whole.items():
        shown, told = seen[words], " ".join(words)
        # then no line is longer than the terminal, but where the names alone are
        widest = max(len(line) for line in shown.text.splitlines())
        assert widest <= columns or len(shown.titles) <= 2, told
        # and every name is there as a pipe has it, in a table with rows
        assert piped.names, told
        assert len(shown.names) == len(piped.names), told
        assert set(shown.names) <= piped.cells, told
        # and each column is shown or named among those left out; a pipe gets them all
        assert not piped.left_out
        assert sorted(shown.titles + shown.left_out) == sorted(piped.titles), told


def test_what_is_left_out_is_the_least_important_from_the_right(cli: Cli, a_farm: None) -> None:
    jobs = {columns: on_terminal((("job", "list"),), columns=columns)["job", "list"] for columns in (90, 100, 120, 200)}
    assert jobs[90].titles == ["Job", "State", "Booked"]
    assert jobs[100].titles == ["Job", "State", "Booked", "Wait", "Dead"]
    assert jobs[120].titles == ["Job", "State", "Booked", "Wait", "Dead", "Done", "Frames"]
    caps = ["Min Cores", "Max Cores", "Max GPUs"]
    assert jobs[120].left_out == ["Folder", "User", "Cores", "Depend", "Pri", *caps, "Age"]
    assert jobs[200].left_out == []
    assert "--json" in " ".join(jobs[90].text.split())


@pytest.mark.parametrize("columns", WIDTHS)
def test_longer_texts_take_several_lines_before_a_column_goes(cli: Cli, a_farm: None, columns: int) -> None:
    shown = on_terminal((("job", "info", JOB), ("host", "info", HOST), ("fleet",)), columns=columns)
    of_job, of_host, of_fleet = (seen.text for seen in shown.values())
    assert LAYER in of_job
    assert JOB in of_host
    assert HOST in of_host
    for number in range(8):
        assert f"alloc-{number:016x}" in of_fleet
    assert max(len(line) for line in of_fleet.splitlines() if "alloc-" in line) <= columns


def test_memory_below_one_gib_is_in_mib(cli: Cli, a_farm: None) -> None:
    frame = cli("job", "frames", JOB, "--state", "RUNNING").out.splitlines()[1]
    assert re.search(r" 0M / 512M$", frame)
