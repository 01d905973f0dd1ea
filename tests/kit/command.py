"""How a command of ours is started, and how it ended."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

PROGRAM = [sys.executable, "-c", "from opencue_sched.cli import main; main()"]


@dataclass(frozen=True)
class Ran:
    """How a command ended."""

    status: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def words(self) -> list[list[str]]:
        """The words of each line of the output."""
        return [line.split() for line in self.out.splitlines()]


Cli = Callable[..., Ran]
