"""What a worker does when it is told of a change."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from opencue_sched.errors import NotReady
from opencue_sched.worker import handlers
from opencue_sched.worker.handlers import Handlers


def test_shows_are_woken_though_the_running_frames_of_a_layer_cannot_be_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(handlers, "load_caps", MagicMock())
    ledger, waker, feeds = MagicMock(), MagicMock(), MagicMock()
    ledger.limits_lacking_machines.return_value = []
    ledger.mark.side_effect = NotReady("the store is being filled")
    told: Any = Handlers(MagicMock(), MagicMock(), ledger, waker, hosts=feeds, backlog=feeds)
    with pytest.raises(NotReady):
        told.caps_changed(["bound:layer", "sub:show:alloc"])
    waker.note.assert_called_once_with(shows={"show"})
