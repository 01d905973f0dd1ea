"""Redis counters: the ledger of bookings, caps, recompute, bootstrap and managed shows."""
