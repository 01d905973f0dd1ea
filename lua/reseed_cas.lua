-- reseed_cas: the reference's reseed contract: write booked counters, if nothing moved since they were computed.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 the sequence number the values belong to, then threes (at most 250): vertex key, cores, GPUs
-- Returns {1}; {0, 'retry', sequence number now, the one expected}; {0, 'not_ready', stored epoch, '0'}.
-- Invariants: all or nothing a call; the sequence number stays, so that further calls of the same reseed can follow.
--@include ledger
local seq = call('GET', SEQ) or '0'
if seq ~= ARGV[2] then
  return {0, 'retry', seq, ARGV[2]}
end
for i = 3, #ARGV, 3 do
  call('HSET', ARGV[i], 'int_cores', ARGV[i + 1], 'int_gpus', ARGV[i + 2],
    'ledger_cores', ARGV[i + 1], 'ledger_gpus', ARGV[i + 2], 'foreign_cores', 0, 'foreign_gpus', 0)
end
return {1}
