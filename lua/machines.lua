-- machines: compare the machines of limits with the frames that are counted there.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 'heal' to put right what differs, or 'look', then pairs (at most 250): limit, machine
-- Returns {1, numbers of the pairs that differ...}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: a machine is one of its limit exactly if frames are counted there; no counter is written, but one that is
--         no number. What should be the set of machines and is none differs at each pair, and is made anew.
--@include ledger
--@include counters
local answer = {1}
for i = 3, #ARGV, 2 do
  local set, machine = 'acct:machines:' .. ARGV[i], ARGV[i + 1]
  local frames = counters('acct:limit:' .. ARGV[i] .. '@' .. machine, 'int_running')[1]
  local member = try('SISMEMBER', set, machine)
  local spoilt = type(member) == 'table'
  if spoilt or (frames > 0) ~= (member == 1) then
    if ARGV[2] == 'heal' then
      if spoilt then call('UNLINK', set) end
      call(frames > 0 and 'SADD' or 'SREM', set, machine)
    end
    answer[#answer + 1] = (i - 1) / 2
  end
end
return answer
