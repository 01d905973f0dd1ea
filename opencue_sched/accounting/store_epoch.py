"""The generation of the store: set by the bootstrap, passed to every script, and tied to one Redis process.

``acct:epoch`` holds ``open|{generation}|{run id}``, or ``filling|{token}|{run id}`` while a bootstrap writes. The run
id is the server's own: after a restart or a failover it is another, and the connection that notices deletes the epoch,
which closes the store for everybody at once (accounting.connection). ``|dual`` behind either says that another program
publishes plain decrements (release_feed cuebot-redis), so the scripts keep what the ledger accounts for apart.

It is read by MGET, here and in the scripts, which says nothing of a key of another type where GET raises an error: such
an epoch is none, and whoever fills the store writes over it.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

_DUAL = "|dual"


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch as it stands in the store."""

    text: str

    @property
    def run_id(self) -> str:
        return run_id_of(self.text)

    @property
    def dual(self) -> bool:
        return self.text.endswith(_DUAL)

    @classmethod
    def new(cls, run_id: str, *, dual: bool = False) -> Epoch:
        """An open generation that no store ever had before (a counter would restart from 1 in an emptied Redis)."""
        return cls(f"open|{uuid.uuid4().hex}|{run_id}{_DUAL if dual else ''}")

    @classmethod
    def filling(cls, run_id: str, *, dual: bool = False) -> Epoch:
        """The state of a store under bootstrap: only who has this value may write, and nobody may book."""
        return cls(f"filling|{uuid.uuid4().hex}|{run_id}{_DUAL if dual else ''}")

    @classmethod
    def parse(cls, text: str | None) -> Epoch | None:
        """An open epoch; None for an absent one, or a store that is still being filled."""
        return cls(text) if text and text.startswith("open|") and run_id_of(text) else None


def run_id_of(text: str) -> str:
    """The Redis process an epoch belongs to; empty for text that is no epoch."""
    parts = text.split("|")
    return parts[2] if len(parts) > 2 else ""
