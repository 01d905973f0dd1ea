"""The generation of the store: set by the bootstrap, passed to every script, and tied to one Redis process.

``acct:epoch`` holds ``open|{generation}|{run id}``, or ``filling|{token}|{run id}`` while a bootstrap writes. The run
id is the server's own: after a restart or a failover it is another, and the connection that notices deletes the epoch,
which closes the store for everybody at once (accounting.connection).
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch as it stands in the store."""

    text: str

    @property
    def run_id(self) -> str:
        return self.text.rpartition("|")[2]

    @classmethod
    def new(cls, run_id: str) -> Epoch:
        """An open generation that no store ever had before (a counter would restart from 1 in an emptied Redis)."""
        return cls(f"open|{uuid.uuid4().hex}|{run_id}")

    @classmethod
    def filling(cls, run_id: str) -> Epoch:
        """The state of a store under bootstrap: only who has this value may write, and nobody may book."""
        return cls(f"filling|{uuid.uuid4().hex}|{run_id}")

    @classmethod
    def parse(cls, text: str | None) -> Epoch | None:
        """An open epoch; None for an absent one, or a store that is still being filled."""
        return cls(text) if text and text.startswith("open|") and text.count("|") == 2 else None
