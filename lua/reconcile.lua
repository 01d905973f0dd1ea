-- reconcile: bring entries of the ledger to what the proc table says, one by one.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 owner of what is added, then fours (at most 250): pk_proc,
--         expected changed seq ('' expects no entry, or an unreadable one; 'any' confirms what is there, or adds it: its
--         proc was committed), state ('F', 'C', or '' to remove), entry ('' to remove)
-- Returns {1, seq, applied, {ids left...}, ids passed over...}, or {0, 'not_ready', stored epoch, '0'}.
--         Left are those for which there was no time; never all of those that are to be moved. Passed over: the entry
--         changed since it was read, or the id to be added is there by now or is tombstoned.
-- Invariants: nothing is decided about an entry other than the one the caller saw, so the call commutes with booking,
--         settling and releasing; a tombstoned id never comes back; an entry that stays the same moves no counter, nor
--         changes when it is confirmed again; removing leaves no tombstone (a settle that comes late means the proc
--         exists). In a dual store a removal leaves int_* to the program that deleted the proc (see foreign).
--@include ledger
--@include moves
local now, bucket = clock()
remember_released({}, bucket)
local ids = {}
for i = 3, #ARGV, 4 do
  ids[#ids + 1] = ARGV[i]
end
-- Whether there is no time any more to count one entry out and another in.
local spent = 0
local function too_much(old, entry, state)
  if old == entry then return false end
  local cost = (old and cost_of(old) or 0) + (state ~= '' and cost_of(entry) or 0)
  spent = spent + cost
  return spent > COMMANDS and spent > cost
end

local known = call('HMGET', LEDGER, unpack(ids))
local answer, seq, fields, gone = {1, 0, 0, {}}, nil, {}, {}
for i, id in ipairs(ids) do
  local at = 3 + (i - 1) * 4
  local expected, state, entry = ARGV[at + 1], ARGV[at + 2], ARGV[at + 3]
  local old, now_state, booked, changed, owner = read_record(known[i])
  local over = expected == 'any' and known[i] and now_state ~= 'F'
  if expected == 'any' then
    expected, entry = changed or '', old or entry
  end
  if over then
    -- Confirmed already; or unreadable, which is left to a recompute.
  elseif (changed or '') ~= expected or (not known[i] and state == '')
    or (not old and state ~= '' and tombstoned(id, bucket)) then
    answer[#answer + 1] = id
  elseif too_much(old, entry, state) then
    table.insert(answer[4], id)
  else
    seq = seq or next_seq()
    if old and old ~= entry then
      move(id, old, -1, seq, nil, DUAL and state == '')
    end
    if state == '' then
      gone[#gone + 1] = id
    else
      if old ~= entry then
        move(id, entry, 1, seq, booked or now)
      end
      fields[#fields + 1], fields[#fields + 2] = id, record_of(state, booked or now, seq, owner or ARGV[2], entry)
    end
    answer[3] = answer[3] + 1
  end
end
if seq then
  apply_moves()
  if #gone > 0 then call('HDEL', LEDGER, unpack(gone)) end
  if #fields > 0 then call('HSET', LEDGER, unpack(fields)) end
end
answer[2] = seq or seq_now()
return answer
