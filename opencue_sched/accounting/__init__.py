"""The live counters in Redis: who may book how much, and what is booked (docs/accounting.md)."""
