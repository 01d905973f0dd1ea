-- adjust: take out of counters what no ledger entry accounts for.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 name of this correction, then threes (at most 250): vertex key, cores to add, GPUs to add (a limit:
--         frames, 0)
-- Returns {1, seq}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: adds, never overwrites, so it commutes with everything that moves counter and ledger together; a
--         correction sent again after a lost answer is made once.
--@include ledger
if not call('SET', 'acct:adjusted:' .. ARGV[2], 1, 'NX', 'EX', 600) then
  return {1, tonumber(call('GET', SEQ) or 0)}
end
for i = 3, #ARGV, 3 do
  if string.sub(ARGV[i], 1, 11) == 'acct:limit:' then
    call('HINCRBY', ARGV[i], 'int_running', ARGV[i + 1])
  else
    call('HINCRBY', ARGV[i], 'int_cores', ARGV[i + 1])
    call('HINCRBY', ARGV[i], 'int_gpus', ARGV[i + 2])
  end
end
return {1, call('INCR', SEQ)}
