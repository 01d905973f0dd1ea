-- foreign: dissolve what a dual store's counters and ledger disagree on, when it can no longer be explained.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 phase, 3 grace in seconds, then vertex keys (at most 250)
-- Returns {1}, or {0, 'not_ready', stored epoch, '0'}.
--         The foreign delta of a vertex is int_* less ledger_*. Dropping an entry takes it off the ledger only. Above 0 is
--         an entry whose decrement has not come: in phase 'before' (a cycle's start) it is taken off once the last drop
--         is older than the grace, because then it was lost. Below 0 is a decrement whose entry is still there: in phase
--         'after' (its end) what was there at the last cycle's end too belongs to no entry of ours, and is given back.
-- Invariants: adds, never overwrites; a decrement is never taken off twice unless it comes after the grace.
--@include ledger
--@include counters
--@include seq
seq_now()
local now, corrected = tonumber((clock())), false
for i = 4, #ARGV do
  local key = ARGV[i]
  local read = counters(key, 'int_cores', 'int_gpus', 'ledger_cores', 'ledger_gpus', 'foreign_cores',
    'foreign_gpus', 'dropped_at')
  for j, unit in ipairs({'cores', 'gpus'}) do
    local delta, before = read[j] - read[j + 2], read[j + 4]
    local back = 0
    if ARGV[2] == 'before' then
      if delta > 0 and now - read[7] >= tonumber(ARGV[3]) then back = -delta end
    else
      if delta < 0 and before < 0 then back = math.min(-delta, -before) end
      call('HSET', key, 'foreign_' .. unit, math.min(0, delta + back))
    end
    if back ~= 0 then
      add(key, 'int_' .. unit, back)
      corrected = true
    end
  end
end
if corrected then next_seq() end
return {1}
