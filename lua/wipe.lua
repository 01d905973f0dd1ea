-- wipe: drop what an older process of Redis left, before the store is filled.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 the filling epoch, then keys to drop (at most 250)
-- Returns {1, dropped}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: only the filler of the last epoch_fill drops anything: one that was overtaken in a pause cannot take away
--             what its successor has filled.
--@include ledger
return {1, call('UNLINK', unpack(ARGV, 2))}
