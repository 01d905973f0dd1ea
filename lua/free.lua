-- free: delete keys: vertices whose rows are gone, or what an older process of Redis left.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 'idle' for vertices that count nothing, 'all' for whatever there is, then keys (at most 250)
-- Returns {1, deleted}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: a vertex that is booked again is unseeded and gets its caps; a filler that was overtaken in a pause cannot
--         take away what its successor has filled.
--@include ledger
local free = {}
for i = 3, #ARGV do
  local used = false
  if ARGV[2] == 'idle' then
    local read = call('HMGET', ARGV[i], 'int_cores', 'int_gpus', 'ledger_cores', 'ledger_gpus')
    for j = 1, 4 do
      used = used or tonumber(read[j] or 0) ~= 0
    end
  end
  if not used then
    free[#free + 1] = ARGV[i]
  end
end
return {1, #free > 0 and call('UNLINK', unpack(free)) or 0}
