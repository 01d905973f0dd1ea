"""Moments as people type them."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime

import pytest

from opencue_sched.domain.moments import moment_of
from opencue_sched.errors import InvalidInput


@pytest.fixture(autouse=True)
def in_vancouver(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The local zone is eight hours behind UTC in winter, and clocks go back on the first Sunday of November."""
    monkeypatch.setenv("TZ", "PST8PDT,M3.2.0,M11.1.0")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


NOON = "2026-11-29T12:00:00-08:00"


@pytest.mark.parametrize(
    ("now", "words", "moment"),
    [
        (NOON, "18:00", "2026-11-29T18:00:00-08:00"),
        (NOON, "9:30", "2026-11-30T09:30:00-08:00"),
        (NOON, "12:00", "2026-11-30T12:00:00-08:00"),
        (NOON, "2026-12-24", "2026-12-24T00:00:00-08:00"),
        (NOON, " 2026-12-24 18:00 ", "2026-12-24T18:00:00-08:00"),
        (NOON, "2026-07-01 18:00", "2026-07-01T18:00:00-07:00"),
        (NOON, "2026-12-24T18:00:00+01:00", "2026-12-24T09:00:00-08:00"),
        ("2026-10-31T20:00:00-07:00", "19:00", "2026-11-01T19:00:00-08:00"),
    ],
)
def test_what_people_type_is_a_moment(now: str, words: str, moment: str) -> None:
    assert moment_of(words, datetime.fromisoformat(now).astimezone()) == datetime.fromisoformat(moment)


@pytest.mark.parametrize(
    "words", ["", "soon", "25:00", "18.00", "2026-13-01", "24.12.2026", "9999-12-31", "9999-12-31 23:59-12:00"]
)
def test_anything_else_is_refused(words: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(repr(words))):
        moment_of(words, datetime.fromisoformat(NOON).astimezone())
