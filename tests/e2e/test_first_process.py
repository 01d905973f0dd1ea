"""Each service as the first process of a container: a signal to stop reaches it also while it starts.

The kernel gives such a process no signal for which it has no handler.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.warm_start import ROOT
from tests.kit.polling import eventually

SERVICES = {
    "worker": ("-m", "celery", "-A", "opencue_sched", "worker"),
    "beat": ("-m", "celery", "-A", "opencue_sched", "beat"),
    "flower": ("-m", "celery", "-A", "opencue_sched", "flower"),
    "report service": ("-c", "from opencue_sched.cli import main; main()", "report-service"),
}
APART = ("unshare", "--pid", "--fork", "--kill-child")


def can_be_first() -> bool:
    return shutil.which(APART[0]) is not None and subprocess.run([*APART, "true"], capture_output=True).returncode == 0


@contextmanager
def first_process(words: tuple[str, ...], settings_file: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A process that is the first of its namespace, and its id here. It reads its settings from ``settings_file``."""
    outer = subprocess.Popen(
        [*APART, sys.executable, *words],
        cwd=ROOT,
        env={**os.environ, "OPENCUE_SCHED_CONFIG": str(settings_file)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
    try:
        yield outer, int(eventually(lambda: children.read_text().split(), 20, "the first process")[0])
    finally:
        outer.kill()
        outer.communicate()


@pytest.mark.skipif(not can_be_first(), reason="needs the right to make a process the first of its own namespace")
@pytest.mark.parametrize("service", SERVICES)
def test_a_service_that_still_reads_its_settings_ends_when_it_is_told_to(service: str, tmp_path: Path) -> None:
    # given a service whose settings are in a pipe that nobody writes to
    pipe = tmp_path / "settings.yaml"
    os.mkfifo(pipe)

    def is_read() -> int | None:
        try:
            return os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
        except OSError:  # nobody reads it yet
            return None

    with first_process(SERVICES[service], pipe) as (outer, first):
        writing = eventually(is_read, 60, "a service that reads its settings")
        # when it is told to stop, then it does
        os.kill(first, signal.SIGTERM)
        status = outer.wait(timeout=30)
        os.close(writing)
    assert status == 128 + signal.SIGTERM
