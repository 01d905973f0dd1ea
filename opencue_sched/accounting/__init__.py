"""The live counters in Redis: who may book how much, and what is booked (docs/accounting.md).

The ledger of bookings, the caps beside the counters, the filling of an empty Redis, the recompute that compares all
with the procs in PostgreSQL, and the way of a show from Cuebot to us and back. Scripts are in lua/, SQL is in store/.
What to book is decided elsewhere: a plan by placement/, the order of booking and commit by dispatch/.
"""
