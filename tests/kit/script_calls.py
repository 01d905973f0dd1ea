"""One call of each accounting script."""

from __future__ import annotations

from opencue_sched.accounting import ledger as scripts
from opencue_sched.accounting.keys import Booking
from opencue_sched.accounting.ledger import Change
from opencue_sched.clients.lua_scripts import ScriptCall
from opencue_sched.domain.caps import Vertices

BOOKING = Booking("p", Vertices("s", "a", "f", "j", "l", "d", ("n", "m")), 4, 1)

# One call of each script with two of whatever it takes many of, and how many arguments one of them is.
CALLS: dict[str, tuple[ScriptCall, int]] = {
    "book": (scripts.book_call("e", "check", BOOKING, "me"), 0),
    "release": (scripts.id_calls("release", ["p", "q"], "e")[0], 1),
    "reconcile": (scripts.reconcile_calls("e", [Change("p", None, "x"), Change("q", 3, None)], "me")[0], 4),
    "caps": (scripts.caps_calls("e", "s|7", [("k", ("burst", "1")), ("l", ("burst", "2"))])[0], 2),
    "inventory": (scripts.id_calls("inventory", ["k", "l"], "e")[0], 1),
    "adjust": (scripts.adjust_calls("e", "t", [("k", 1, 0), ("l", -1, 0)])[0], 3),
    "free": (scripts.id_calls("free", ["k", "l"], "e", "idle")[0], 1),
    "machines": (scripts.machines_calls("e", [("k", "m", ""), ("l", "m", "")], heal=True)[0], 3),
    "reseed_cas": (scripts.reseed_cas_calls("e", 5, [("k", 1, 0), ("l", 2, 0)])[0], 3),
    "foreign": (scripts.id_calls("foreign", ["k", "l"], "e", "before", 30)[0], 1),
    "epoch_set": (scripts.epoch_set_call("f", "o"), 0),
    "lease_drop": (ScriptCall("lease_drop", ["k"], ["t"]), 0),
    "lease_take": (ScriptCall("lease_take", ["k"], ["t", 1000]), 0),
}
