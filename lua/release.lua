-- release: the procs are gone; their entries leave the ledger and the counters.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, then pk_procs (at most 250, each once)
-- Returns {1, seq or 0, entries removed, ids left for another call...}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: the vertices are those the entry was booked under, wherever job and host are now; releasing twice, or an
--         id never booked, moves no counter; every id leaves a tombstone either way. Nobody but the ledger knows how
--         much an id is to do, so a call leaves those for which there is no work left, but not its first one.
--@include ledger
--@include moves
local ids = {unpack(ARGV, 2)}
local _, bucket = clock()
local known = call('HMGET', LEDGER, unpack(ids))
local done, gone, answer, work = {}, {}, {1, 0, 0}, 0
for i, id in ipairs(ids) do
  local entry
  if known[i] then
    _, _, _, _, entry = string.match(known[i], RECORD)
  end
  work = work + WORK_OF_AN_ID
  if entry then
    local _, commas = string.gsub(entry, ',', '')
    work = work + WORK_OF_A_VERTEX * (string.sub(entry, -1) == '|' and 5 or 6 + commas)
  end
  if i > 1 and work > WORK then
    answer[#answer + 1] = id
  else
    done[#done + 1] = id
    if known[i] then
      move(id, entry, -1)
      gone[#gone + 1] = id
    end
  end
end
remember_released(done, bucket)
if #gone > 0 then
  answer[2], answer[3] = call('INCR', SEQ), #gone
  apply_moves(answer[2])
  call('HDEL', LEDGER, unpack(gone))
end
return answer
