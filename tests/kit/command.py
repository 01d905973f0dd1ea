"""How a command of ours ended."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


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
