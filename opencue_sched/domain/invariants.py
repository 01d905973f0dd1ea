"""What must hold of the farm whatever fails: a name and a sentence for each invariant.

docs/architecture.md has the same table, and says for each what shows it: the audit, a test, or both.
"""

from __future__ import annotations

from enum import StrEnum


class Invariant(StrEnum):
    """The name of an invariant: what the audit, its JSON and the documents call it. Named in the table's order."""

    COUNTERS_MATCH_LEDGER = "counters-match-ledger"
    WITHIN_CAPS = "within-caps"
    RECOMPUTE_COMPLETES = "recompute-completes"
    LEDGER_MATCHES_PROCS = "ledger-matches-procs"
    ONE_OWNER_PER_RUN = "one-owner-per-run"
    RUNNING_FRAMES_HAVE_PROCS = "running-frames-have-procs"
    LAYER_COUNTERS_MATCH_FRAMES = "layer-counters-match-frames"
    HOST_IDLE_MATCHES_PROCS = "host-idle-matches-procs"
    COUNTERS_OPEN = "counters-open"
    FOLLOWS_POSTGRESQL = "follows-postgresql"
    FORMER_LEADER_REFUSED = "former-leader-refused"
    TICK_FIRES_ONCE = "tick-fires-once"
    BAD_INPUT_CONTAINED = "bad-input-contained"

    @property
    def sentence(self) -> str:
        """What must hold, for an operator."""
        return _SENTENCES[self]


_SENTENCES = {
    Invariant.COUNTERS_MATCH_LEDGER: "every counter is the sum of its ledger entries",
    Invariant.WITHIN_CAPS: "no subscription, folder, job or limit has more booked than its cap, lowered caps included",
    Invariant.RECOMPUTE_COMPLETES: "a recompute completes under any load",
    Invariant.LEDGER_MATCHES_PROCS: "the ledger holds the procs of managed shows, and what is being booked",
    Invariant.ONE_OWNER_PER_RUN: (
        "only the owning proc's completion counts, and a process without a proc is killed within two host reports"
    ),
    Invariant.RUNNING_FRAMES_HAVE_PROCS: "every RUNNING frame has a proc, and every proc a RUNNING frame",
    Invariant.LAYER_COUNTERS_MATCH_FRAMES: "the counters of a layer are what its frames say",
    Invariant.HOST_IDLE_MATCHES_PROCS: "what a host has idle is its total less its procs, and nothing is negative",
    Invariant.COUNTERS_OPEN: "the counters are filled and open; an emptied Redis stops booking and is filled again",
    Invariant.FOLLOWS_POSTGRESQL: "dispatch stops and recovers with PostgreSQL",
    Invariant.FORMER_LEADER_REFUSED: "a paused former leader's writes are refused",
    Invariant.TICK_FIRES_ONCE: "no tick fires twice",
    Invariant.BAD_INPUT_CONTAINED: "malformed input harms nothing else",
}
