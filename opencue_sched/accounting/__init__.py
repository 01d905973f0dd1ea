"""The live counters in Redis: who may book how much, and what is booked (design section 4, docs/accounting.md).

``keys`` names the keys and says how a booking is written down, ``connection`` opens Redis and knows whose counters it
has, ``ledger`` books and releases, ``caps`` carries caps from PostgreSQL, ``consistency`` compares counters with the
ledger, ``reconcile`` brings ledger and proc table together, ``show_handover`` moves shows, ``bootstrap`` fills an empty
store.
"""
