"""What a worker does when it is told of a change."""

from __future__ import annotations

from typing import Any
from unittest.mock import MagicMock

import pytest

from opencue_sched.errors import NotReady
from opencue_sched.worker import handlers
from opencue_sched.worker.handlers import MOST_LEFT_TO_FOLLOW, Handlers


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


def test_layers_that_cannot_be_followed_are_followed_when_they_can(monkeypatch: pytest.MonkeyPatch) -> None:
    # given a worker that hears of a layer and cannot read its caps, and then not follow it
    monkeypatch.setattr(handlers, "load_caps", MagicMock(side_effect=NotReady("the store is being filled")))
    follow = MagicMock(side_effect=NotReady("the store is being filled"))
    monkeypatch.setattr(handlers, "follow_layers", follow)
    ledger, feeds = MagicMock(), MagicMock()
    ledger.limits_lacking_machines.return_value = []
    told: Any = Handlers(MagicMock(), MagicMock(), ledger, MagicMock(), hosts=feeds, backlog=feeds)
    with pytest.raises(NotReady):
        told.caps_changed(["bound:layer", "limit:nuke"])
    with pytest.raises(NotReady):
        told.follow_again()
    # when it can, then it follows the layer, once
    follow.side_effect = None
    told.follow_again()
    told.follow_again()
    assert [set(call.args[2]) for call in follow.call_args_list] == [{"layer"}] * 2


def test_no_more_is_kept_to_be_followed_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    follow = MagicMock()
    monkeypatch.setattr(handlers, "follow_layers", follow)
    ledger, feeds = MagicMock(), MagicMock()
    ledger.follows_limits.return_value = False
    told: Any = Handlers(MagicMock(), MagicMock(), ledger, MagicMock(), hosts=feeds, backlog=feeds)
    for first in range(0, 3 * MOST_LEFT_TO_FOLLOW, 1000):
        told.caps_changed([f"bound:{number}" for number in range(first, first + 1000)])
    told.follow_again()
    (call,) = follow.call_args_list
    assert len(call.args[2]) == MOST_LEFT_TO_FOLLOW
