"""Imported by workers of a control: frames under a limit of machines go to any machine that may run them, in the
order of all other frames, instead of first to those that hold the limit, and then to those that most of them fit on."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from opencue_sched.placement.headroom import PlanHeadroom, Where


def _anywhere(*_: Any) -> Iterator[Where]:
    yield Where()


PlanHeadroom.where_seats_serve = _anywhere  # type: ignore[assignment, method-assign]
