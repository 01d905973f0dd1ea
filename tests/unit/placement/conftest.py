"""A clock that stands still until a test moves it."""

from __future__ import annotations

import pytest

from tests.kit.frozen_clock import Clock


@pytest.fixture
def clock() -> Clock:
    return Clock()
