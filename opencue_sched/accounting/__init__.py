"""The live counters in Redis: who may book how much, and what is booked (design section 4, docs/accounting.md)."""
