"""The live counters in Redis: who may book how much, and what is booked (design section 4, docs/accounting.md).

``keys`` names the keys, ``entries`` says how a booking is written down, ``scripts`` calls the Lua scripts, ``ledger``
books and releases, ``caps`` carries caps from PostgreSQL, ``reconcile`` brings ledger and proc table together,
``show_handover`` moves shows, ``bootstrap`` fills an empty store.
"""
