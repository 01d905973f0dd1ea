"""What a board refuses before it asks Redis, and what Redis' refusals mean to the caller."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from opencue_sched.coordination.board import NEVER, End
from opencue_sched.coordination.board_errors import BoardError, ClaimLost, JobFailure, NotFound, UnclaimableJob


def check_owner(who: str) -> None:
    """Raises TypeError or ValueError for what names nobody."""
    if not isinstance(who, str):
        raise TypeError(f"an owner is named by a string, not by {type(who).__name__}")
    if not who:
        raise ValueError("an owner needs a name")


def check_expiry(expiry: float | None) -> None:
    """Raises ValueError for a life that is none."""
    if expiry is not None and not (expiry > 0 or expiry == NEVER):
        raise ValueError(f"a claim's expiry must be above 0 seconds, not {expiry!r}")


def claim_refused(board: str, uuid: str, answer: Sequence[Any]) -> BoardError:
    """Why a job was not claimed, from the answer of lua/board_claim.lua."""
    reason = answer[1]
    if reason == "gone":
        return NotFound(f"job {uuid} is not on board {board!r}")
    if reason == "trashed":
        return NotFound(f"job {uuid} is in the trash of board {board!r}")
    if reason == "held":
        return UnclaimableJob(f"job {uuid} is claimed by {answer[2]!r}", owner=str(answer[2]))
    return UnclaimableJob(f"job {uuid} is not due for {float(answer[2]) / 1000:.1f} s")


def end_refused(uuid: str, who: str, seen: str, how: End, answer: Sequence[Any]) -> BoardError:
    """Why a claim was not ended, from the answer of lua/board_end.lua; ``seen`` is the owner that the handle knows."""
    reason = answer[1]
    if reason in ("gone", "unclaimed"):
        return NotFound(f"job {uuid} is {'gone' if reason == 'gone' else 'claimed by nobody'}; cannot {how} it")
    if reason == "other" and seen != who:
        return JobFailure(f"job {uuid} is claimed by {answer[2]!r}, not by {who!r}; cannot {how} it")
    return ClaimLost(f"job {uuid} was claimed again since; cannot {how} it")
