"""What benchmarks/warm_start.py starts is what Python starts by the same command line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from benchmarks import warm_start
from tests.kit.polling import eventually

# All that a process is given, and that a fork without exec might leave otherwise.
SELF = """
    import gc, json, os, resource, signal, sys, threading
    print(json.dumps({
        "module": __name__,
        "arguments": sys.argv,
        "path": sys.path,
        "environment": dict(os.environ),
        "directory": os.getcwd(),
        "files": sorted(int(number) for number in os.listdir("/proc/self/fd"))[:-1],
        "leads": [os.getsid(0) == os.getpid(), os.getpgrp() == os.getpid()],
        "handlers": {int(it): str(signal.getsignal(it)).partition(" at ")[0] for it in signal.valid_signals()},
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "threads": threading.active_count(),
        "collects": [gc.isenabled(), gc.get_threshold()],
        "limits": [resource.getrlimit(it) for it in (resource.RLIMIT_NOFILE, resource.RLIMIT_CORE)],
        "umask": os.umask(0o77),
        "unset": [name for name in ("tasks", "celeryconfig", "opencue_sched.celery") if name in sys.modules],
    }))
"""


def python(source: str, *arguments: str) -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(source), *arguments]


def environment(**more: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if key != "PYTHONPATH"}, **more}


@pytest.fixture
def start(tmp_path):
    """Starts Python code with its output in a file; it ends with the test."""
    started = []

    def begin(source: str, *arguments: str) -> tuple[warm_start.WarmProcess, Path]:
        log = tmp_path / f"{len(started)}.log"
        command = python(source, *arguments)
        process = warm_start.WarmProcess(command, log=log, env=environment(), cwd=tmp_path, kill_after=0.5)
        started.append(process.start())
        return process, log

    yield begin
    for process in started:
        process.kill()


@pytest.mark.parametrize("kind", ["-c", "-m"])
def test_a_forked_process_finds_what_one_of_its_own_interpreter_finds(tmp_path, kind):
    (tmp_path / "asking.py").write_text(textwrap.dedent(SELF), encoding="utf-8")
    command = [sys.executable, kind, "asking" if kind == "-m" else textwrap.dedent(SELF), "one", "-two"]
    given = environment(PYTHONPATH=os.pathsep.join(("/nowhere", str(tmp_path))), OPENCUE_SCHED_INSTANCE="mine")
    plain = subprocess.run(
        command, env=given, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, start_new_session=True
    )
    forked = warm_start.run(command, env=given, cwd=tmp_path)
    assert (forked.returncode, forked.stderr) == (plain.returncode, plain.stderr.decode()) == (0, "")
    assert json.loads(forked.stdout) == json.loads(plain.stdout)
    assert json.loads(forked.stdout)["environment"] == given


@pytest.mark.parametrize(
    ("source", "status", "said"),
    [
        ("import atexit, sys; atexit.register(print, 'left'); sys.exit(3)", 3, "left\n"),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("raise RuntimeError('odd')", 1, "RuntimeError: odd\n"),
        ("import threading; threading.Timer(0.1, print, ['a thread']).start()", 0, "a thread\n"),
        ("import os; os.kill(os.getpid(), 9)", -signal.SIGKILL, ""),
    ],
)
def test_it_ends_as_an_interpreter_ends(source, status, said):
    ended = warm_start.run(python(source), env=environment())
    assert ended.returncode == status
    assert (ended.stdout + ended.stderr).endswith(said)


LASTING = """
    import signal, subprocess, sys, time
    if sys.argv[1] == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if sys.argv[1] == "mother":
        print(subprocess.Popen(["sleep", "600"]).pid, flush=True)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_it_can_be_frozen_stopped_and_started_again(start):
    process, log = start(LASTING, "plain")
    eventually(lambda: "ready" in log.read_text(), what="a start")
    before = process.pid
    process.pause()
    eventually(lambda: ") T " in Path(f"/proc/{before}/stat").read_text(), what="a standstill")
    assert process.running
    assert process.stop() == 128 + signal.SIGTERM
    assert not process.running
    assert process.start().pid != before
    process.kill()
    assert process.exit_code == 128 + signal.SIGKILL


def test_one_that_does_not_end_is_killed_and_what_it_started_goes_with_it(start):
    process, log = start(LASTING, "mother")
    eventually(lambda: "ready" in log.read_text(), what="a start")
    child = Path(f"/proc/{log.read_text().split()[0]}")
    assert child.exists()
    process.kill()
    eventually(lambda: not child.exists() or ") Z " in (child / "stat").read_text(), what="the end of its child")
    deaf, log = start(LASTING, "deaf")
    eventually(lambda: "ready" in log.read_text(), what="a start")
    assert deaf.stop() == 128 + signal.SIGKILL


def test_what_only_an_interpreter_of_its_own_can_have_is_refused():
    with pytest.raises(AssertionError, match="too late"):
        warm_start.run(python("pass"), env=environment(PYTHONHASHSEED="1"))


ASKING = """
    import os, signal, sys
    from benchmarks import warm_start
    warm_start.share(sys.argv[1])
    nothing, say = open(os.devnull, "r+b"), [sys.executable, "-c", "import os; print(os.getppid())"]
    print(warm_start.run(say, env=os.environ).stdout)
    lasting = [sys.executable, "-c", "import time; time.sleep(600)"]
    print(warm_start.Started(lasting, env=os.environ, stdout=nothing, stderr=nothing).pid)
    print("ready", flush=True)
    sys.stdin.read()
"""


def test_processes_that_share_one_have_what_they_started_ended_each_with_itself_alone():
    # given two that share the process that forks
    with warm_start.shared_server() as name:
        asking = [
            subprocess.Popen(
                [*python(ASKING), name], cwd=warm_start.ROOT, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            for _ in range(2)
        ]
        said = ["".join(iter(process.stdout.readline, "ready\n")).split() for process in asking]
        # then each is served by a process forked for it
        (server, lasting), (other_server, other_lasting) = said
        assert server != other_server
        # when one ends, then so has what it started, and what the other started has not
        asking[0].communicate()
        assert not _lives(server) and not _lives(lasting)
        assert _lives(other_server) and _lives(other_lasting)
    # and nothing is left once the one that they share ends
    eventually(lambda: not _lives(other_server) and not _lives(other_lasting), what="the end of all")
    asking[1].communicate()


def _lives(pid: str) -> bool:
    try:
        return ") Z " not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
