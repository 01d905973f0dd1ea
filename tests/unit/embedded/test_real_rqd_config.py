"""What a real RQD is told, and how its environment is described."""

from __future__ import annotations

import configparser
import subprocess
import sys
from pathlib import Path

import pytest

from opencue_sched.embedded.rqds import real_rqd, rqd_launcher
from opencue_sched.embedded.rqds.real_rqd import RqdConfig, rqd_environment_directory, threads_per_core


def test_the_configuration_is_what_rqd_reads() -> None:
    config = RqdConfig("render1", 20123, "127.0.0.1", 8443, cores=3, tags=("general", "fast"), facility="local")
    parser = configparser.RawConfigParser()
    parser.optionxform = str  # type: ignore[assignment, method-assign]
    parser.read_string(config.text())
    section = dict(parser["Override"])
    assert section["OVERRIDE_HOSTNAME"] == "render1"
    assert (section["RQD_GRPC_PORT"], section["CUEBOT_GRPC_PORT"]) == ("20123", "8443")
    assert section["RQD_TAGS"] == "general fast"
    assert section["DEFAULT_FACILITY"] == "local"
    assert section["RQD_NETWORK_INTERFACE"] == "lo"
    assert int(section["OVERRIDE_CORES"]) == 3 * threads_per_core()


@pytest.mark.parametrize(
    ("text", "threads"),
    [
        ("siblings\t: 8\ncpu cores\t: 4\n", 2),
        ("siblings\t: 4\ncpu cores\t: 4\n", 1),
        ("siblings\t: 1\ncpu cores\t: 2\n", 1),
        ("model name: something else\n", 1),
    ],
)
def test_hyper_threading_is_counted_as_rqd_does(tmp_path: Path, text: str, threads: int) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text(text)
    assert threads_per_core(cpuinfo) == threads
    assert threads_per_core(tmp_path / "absent") == 1


def test_in_a_checkout_the_environment_lies_beside_it() -> None:
    directory = rqd_environment_directory()
    assert (directory.parent / "pyproject.toml").is_file()
    assert directory.name == ".venv-rqd"


def test_what_only_this_shell_has_on_its_path_is_not_taken_for_installed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The RQDs are started without PYTHONPATH, so what pip finds there would be missing then."""
    # given a Python that makes environments, whose own Python notes what it is told
    noted = tmp_path / "noted"
    noting = program(tmp_path / "noting", f'echo "$@" | head -1 >> {noted}; echo psutil==5.9.8')
    maker = program(tmp_path / "python", f'mkdir -p "$3/bin" && cp {noting} "$3/bin/python"')
    monkeypatch.setattr(sys, "executable", str(maker))

    # when an environment is made
    python = real_rqd.ensure_rqd_environment(tmp_path / "venv")

    # then all that its Python does to fill it is isolated, and it is made once
    assert python == tmp_path / "venv" / "bin" / "python"
    calls = noted.read_text().splitlines()
    assert len(calls) == 3
    assert {call.split()[0] for call in calls} == {"-I"}
    assert real_rqd.ensure_rqd_environment(tmp_path / "venv") == python
    assert noted.read_text().splitlines() == calls


def program(path: Path, does: str) -> Path:
    """A program of the shell."""
    path.write_text(f"#!/bin/sh\n{does}\n")
    path.chmod(0o755)
    return path


def test_a_frame_starts_without_the_time_program(tmp_path: Path) -> None:
    # given a command file without an interpreter line, as RQD writes it
    command = tmp_path / "cmd"
    command.write_text("echo rendered $CUE_FRAME")
    command.chmod(0o755)

    # when it is started the way RQD does on a machine that lacks /usr/bin/time
    process = rqd_launcher.WithoutTime(
        ["/usr/bin/time", "-p", "-o", str(tmp_path / "stat"), str(command)],
        stdout=subprocess.PIPE,
        env={"CUE_FRAME": "0001-a", "PATH": "/usr/bin:/bin"},
    )

    # then it runs
    assert process.communicate()[0] == b"rendered 0001-a\n"
    # and other commands are left as they are
    other = rqd_launcher.WithoutTime([sys.executable, "-c", "print(1)"], stdout=subprocess.PIPE)
    assert other.communicate()[0] == b"1\n"
