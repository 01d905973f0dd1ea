-- release: the procs are gone; their entries leave the ledger and the counters.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, then pk_procs (at most 250, each once)
-- Returns {1, seq or 0, entries removed, ids left...}, or {0, 'not_ready', stored epoch, '0'}. Left are those for which
--         there was no time, as they were: at least one of those with an entry is never left.
-- Invariants: the vertices are those the entry was booked under, wherever job and host are now; releasing twice, or an
--         id never booked, moves no counter; every id that is not left leaves a tombstone either way.
--@include ledger
--@include moves
return release({unpack(ARGV, 2)})
