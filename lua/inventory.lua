-- inventory: read counters, and the moment they were read at.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, then vertex keys (at most 250)
-- Returns {1, seq, two numbers a key: int_cores and int_gpus, or int_running and 0}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: every change the counters hold has a number at or below seq; only a counter that is no number is written.
--@include ledger
--@include counters
--@include seq
local answer = {1, seq_now()}
for i = 2, #ARGV do
  local limit = string.sub(ARGV[i], 1, 11) == 'acct:limit:'
  local read = limit and counters(ARGV[i], 'int_running') or counters(ARGV[i], 'int_cores', 'int_gpus')
  answer[#answer + 1], answer[#answer + 2] = read[1], read[2] or 0
end
return answer
