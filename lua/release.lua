-- release: the procs are gone; their entries leave the ledger and the counters.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, then pk_procs (at most 250)
-- Returns {1, seq, entries removed}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: the vertices are those the entry was booked under, wherever job and host are now; releasing twice, or an
--         id never booked, moves no counter; every id leaves a tombstone either way.
--@include ledger
--@include moves
local ids, seen = {}, {}
for i = 2, #ARGV do
  if not seen[ARGV[i]] then
    seen[ARGV[i]] = true
    ids[#ids + 1] = ARGV[i]
  end
end
local _, bucket = clock()
bury(ids, bucket)
local gone = {}
if #ids > 0 then
  for i, record in ipairs(call('HMGET', LEDGER, unpack(ids))) do
    if record then
      local _, _, _, _, entry = string.match(record, RECORD)
      move(ids[i], entry, -1)
      gone[#gone + 1] = ids[i]
    end
  end
end
if #gone == 0 then
  return {1, tonumber(call('GET', SEQ) or 0), 0}
end
local seq = call('INCR', SEQ)
apply_moves(seq)
call('HDEL', LEDGER, unpack(gone))
return {1, seq, #gone}
