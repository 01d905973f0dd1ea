"""Fixtures of the release tests."""

from __future__ import annotations

import pytest
from sqlalchemy import Engine

from tests.kit.runs import FarmView, RecordedChanges, RecordedLedger, ScriptedKiller


@pytest.fixture
def view(engine: Engine) -> FarmView:
    return FarmView(engine)


@pytest.fixture
def ledger() -> RecordedLedger:
    return RecordedLedger()


@pytest.fixture
def changes() -> RecordedChanges:
    return RecordedChanges()


@pytest.fixture
def killer() -> ScriptedKiller:
    return ScriptedKiller()
