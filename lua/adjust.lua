-- adjust: take out of counters what no ledger entry accounts for.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 name of this correction, 3 number of this call of it, 4 sequence number at which the first of its
--         counters was read, then threes (at most 250): vertex key, cores to add, GPUs to add (a limit: frames, 0)
-- Returns {1, seq, 1}; {1, seq, 0} when nothing was done; or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: adds, never overwrites, so it commutes with everything that moves counter and ledger together; a
--         call sent again after a lost answer counts once; what another process has corrected since the counters were
--         read is not corrected a second time.
--@include ledger
local corrected, by = string.match(call('GET', 'acct:corrected') or '', '^(%d+)|(.*)$')
if corrected and by ~= ARGV[2] and tonumber(corrected) > tonumber(ARGV[4])
  or not call('SET', 'acct:adjusted:' .. ARGV[2] .. ':' .. ARGV[3], 1, 'NX', 'EX', 600) then
  return {1, tonumber(call('GET', SEQ) or 0), 0}
end
for i = 5, #ARGV, 3 do
  if string.sub(ARGV[i], 1, 11) == 'acct:limit:' then
    add(ARGV[i], 'int_running', ARGV[i + 1])
  else
    add(ARGV[i], 'int_cores', ARGV[i + 1])
    add(ARGV[i], 'int_gpus', ARGV[i + 2])
  end
end
local seq = call('INCR', SEQ)
call('SET', 'acct:corrected', seq .. '|' .. ARGV[2])
return {1, seq, 1}
