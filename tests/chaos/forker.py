"""A process that forks others, which die after so many things they do (stepped_pass.py, stepped_task.py)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import IO, Any

from benchmarks.warm_start import ROOT, Started


@dataclass(frozen=True)
class Forker:
    """What asks the process, and what has its answers."""

    asks: IO[str]
    answers: IO[str]

    def forks(self, **what: Any) -> dict[str, Any]:
        """What became of a process that is to do ``what``: the things it had ``done``, and its exit ``status``."""
        print(json.dumps(what), file=self.asks, flush=True)
        answer: dict[str, Any] = json.loads(self.answers.readline())
        return answer


@contextmanager
def forker(module: str, variables: Mapping[str, str]) -> Iterator[Forker]:
    """A process that runs a module of this package, with no other settings than these. It ends with the context."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("OPENCUE_SCHED_")}
    (asked, asks), (answers, answered) = os.pipe(), os.pipe()
    with os.fdopen(asks, "w") as to_it, os.fdopen(answers) as from_it:
        command = [sys.executable, "-m", f"tests.chaos.{module}"]
        process = Started(command, env={**inherited, **variables}, cwd=ROOT, stdin=asked, stdout=answered, stderr=2)
        os.close(asked)
        os.close(answered)
        try:
            yield Forker(to_it, from_it)
        finally:
            to_it.close()
            process.wait()
