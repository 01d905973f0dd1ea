-- adjust: take out of counters what no ledger entry accounts for, under the consistency check that has found it.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 token of the check, 3 number of this call of it (from 1), then threes (at most 250): vertex key,
--         cores to add, GPUs to add (a limit: frames, 0)
-- Returns {1, seq, 1}; {1, seq, 0} when nothing was done; or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: adds, never overwrites, so it commutes with everything that moves counter and ledger together. A call that
--         is sent again, or after the check ran out (then another may have corrected the same), does nothing.
--@include ledger
--@include counters
--@include seq
local seq = seq_now()
if AUDITING ~= ARGV[2] .. '|' .. (ARGV[3] - 1) then
  return {1, seq, 0}
end
call('SET', AUDIT, ARGV[2] .. '|' .. ARGV[3], 'KEEPTTL')
for i = 4, #ARGV, 3 do
  add_to(ARGV[i], ARGV[i + 1], ARGV[i + 2])
end
return {1, next_seq(), 1}
