-- reclaim: free the vertices of jobs and layers that are finished or gone.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, then vertex keys (at most 250)
-- Returns {1, freed}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: only a vertex that counts nothing is freed; should it be booked again, it is unseeded and gets its caps.
--@include ledger
local free = {}
for i = 2, #ARGV do
  local read = call('HMGET', ARGV[i], 'int_cores', 'int_gpus', 'ledger_cores', 'ledger_gpus')
  local used = false
  for j = 1, 4 do
    used = used or tonumber(read[j] or 0) ~= 0
  end
  if not used then
    free[#free + 1] = ARGV[i]
  end
end
if #free > 0 then
  call('UNLINK', unpack(free))
end
return {1, #free}
