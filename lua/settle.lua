-- settle: the procs are committed; their entries become confirmed.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 owner, then pairs: pk_proc, entry (at most 250 pairs)
-- Returns {1, seq, confirmed, added, released ids...}, or {0, 'not_ready', stored epoch, '0'}.
--         An id the ledger has lost is added, by force, because its proc exists; one released meanwhile is named.
-- Invariants: a confirmed entry stays as it is (settling twice changes nothing); a tombstoned id never comes back.
--@include ledger
--@include moves
local ids, entries = {}, {}
for i = 3, #ARGV, 2 do
  ids[#ids + 1], entries[#entries + 1] = ARGV[i], ARGV[i + 1]
end
local answer = {1, 0, 0, 0}
if #ids == 0 then
  return answer
end
local now, bucket = clock()
local known = call('HMGET', LEDGER, unpack(ids))
local seq, fields = nil, {}
local seen = {}
for i, id in ipairs(ids) do
  if seen[id] then
    -- named twice in one call: the first settles it
  elseif known[i] then
    local state, booked, _, owner, entry = string.match(known[i], RECORD)
    if state == 'F' then
      seq = seq or call('INCR', SEQ)
      fields[#fields + 1], fields[#fields + 2] = id, record_of('C', booked, seq, owner, entry)
      answer[3] = answer[3] + 1
    end
  elseif tombstoned(id, bucket) then
    answer[#answer + 1] = id
  else
    seq = seq or call('INCR', SEQ)
    move(id, entries[i], 1)
    fields[#fields + 1], fields[#fields + 2] = id, record_of('C', now, seq, ARGV[2], entries[i])
    answer[4] = answer[4] + 1
  end
  seen[id] = true
end
if seq then
  apply_moves(seq)
  call('HSET', LEDGER, unpack(fields))
end
answer[2] = seq or tonumber(call('GET', SEQ) or 0)
return answer
