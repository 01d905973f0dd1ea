-- The sequence number. One that nobody can read or increase, or that is too long for a record, ends the script with an
-- error before it has moved anything: the store is lost (opencue_sched/accounting/damage.py). Needs includes/ledger.
local function usable(seq)
  if not seq or seq < 0 or seq > 999999999999999 then error('acct:seq cannot be used') end
  return seq
end

local function seq_now()
  return usable(tonumber(call('GET', SEQ) or 0))
end

local function next_seq()
  return usable(call('INCR', SEQ))
end
