-- Sums up entries per vertex and moves each vertex once; releases procs. Needs includes/ledger.
--@include seq
--@include machines
local moves = {}

local function move_key(key, cores, gpus, ledger_only)
  local sum = moves[key] or {0, 0, 0, 0}
  moves[key] = sum
  sum[3], sum[4] = sum[3] + cores, sum[4] + gpus
  if ledger_only then
    sum.dropped = true
  else
    sum[1], sum[2] = sum[1] + cores, sum[2] + gpus
  end
end

-- The parts of a record, its entry first; nothing of an unreadable one, or of none.
local function read_record(record)
  local state, booked, changed, owner, entry = string.match(record or '', RECORD)
  if changed and #changed < 16 then
    return entry, state, booked, changed, owner
  end
end

local function record_of(state, booked, seq, owner, entry)
  return '1|' .. state .. '|' .. booked .. '|' .. seq .. '|' .. owner .. '|' .. entry
end

-- One call moves entries for so many commands, or one entry: in a dual store a vertex takes more. As many entries as a call
-- may name fit, unless they are under limits that count machines or are reported, which take more commands than others.
local COMMANDS, EACH = 385, DUAL and 38 or 24

-- How many commands it takes at most to move an entry.
local function cost_of(entry)
  if not entry or not string.find(entry, '@', 1, true) then return EACH end
  local cost = DUAL and 26 or 11
  for limit in string.gmatch(string.match(entry, '[^|]*$'), '[^,]+') do
    cost = cost + (string.find(limit, '@.') and 5 or string.find(limit, '@', 1, true) and 2 or 1)
  end
  return math.max(EACH, cost)
end

-- Count the entry of a proc in (sign 1) or out (sign -1), at this sequence number; one that comes in was booked then. An unreadable entry (or nil) goes out
-- without touching counters, so that it cannot block the others of its call; the consistency check puts its counters
-- right. With ledger_only the int_* fields stay: in a dual store the other program takes the cores of a proc it deleted
-- off them itself.
local function move(id, entry, sign, seq, booked, ledger_only)
  local cores, gpus, show, alloc, folder, job, layer, dept, limits = string.match(entry or '', ENTRY)
  if not cores then
    if sign < 0 then return end
    error('malformed ledger entry: ' .. entry)
  end
  for _, key in ipairs(vertices(show, alloc, folder, job, layer, dept)) do
    if key then move_key(key, sign * cores, sign * gpus, ledger_only) end
  end
  for limit in string.gmatch(limits, '[^,]+') do
    move_key('acct:limit:' .. limit, sign, 0)
  end
  if string.find(limits, '@', 1, true) then note_start(id, limits, sign > 0 and booked) end
  if AUDITING then call('RPUSH', AUDIT_LOG, seq .. (sign > 0 and '|+|' or '|-|') .. id .. '|' .. entry) end
end

-- Move the counters of a vertex, in a dual store also what the ledger alone accounts for. GPUs of 0 are written only to
-- a vertex that is new.
local function count(key, cores, gpus, ledger_cores, ledger_gpus)
  local sum = add(key, 'int_cores', cores)
  if sum == cores or gpus ~= 0 then add(key, 'int_gpus', gpus) end
  if DUAL then
    add(key, 'ledger_cores', ledger_cores)
    add(key, 'ledger_gpus', ledger_gpus)
  end
end

-- Adding 0 turns -0, which HINCRBY does not read, into 0.
local function apply_moves()
  local now = DUAL and call('TIME')[1]
  for key, sum in pairs(moves) do
    if string.sub(key, 1, 11) == 'acct:limit:' then
      add_frames(key, sum[1] + 0)
    else
      count(key, sum[1] + 0, sum[2] + 0, sum[3] + 0, sum[4] + 0)
    end
    if sum.dropped then call('HSET', key, 'dropped_at', now) end
  end
end

-- Remember released ids for one to two bucket widths: they go into this bucket and the next, so that one look-up does.
-- Old buckets are unlinked here rather than left to expire, because Redis frees an expired set in the foreground.
local function remember_released(ids, bucket)
  if #ids > 0 then
    for b = bucket, bucket + 1 do
      call('SADD', 'acct:tomb:' .. b, unpack(ids))
      call('EXPIRE', 'acct:tomb:' .. b, TOMB_WIDTH * 4)
    end
  end
  call('UNLINK', 'acct:tomb:' .. (bucket - 1), 'acct:tomb:' .. (bucket - 2))
end

-- Take the entries of these procs (at most 250, each once) out of ledger and counters, and remember their ids as released.
-- Returns {1, seq or 0, entries removed, ids left...}; those that are left are as they were.
local function release(ids)
  local known = call('HMGET', LEDGER, unpack(ids))
  local gone, done, left, seq, cost = {}, {}, {}, 0, 0
  for i, id in ipairs(ids) do
    local entry = read_record(known[i])
    cost = cost + (known[i] and cost_of(entry) or 0)
    if cost > COMMANDS and #gone > 0 and known[i] then
      left[#left + 1] = id
    else
      done[#done + 1] = id
      if known[i] then
        seq = seq > 0 and seq or next_seq()
        move(id, entry, -1, seq)
        gone[#gone + 1] = id
      end
    end
  end
  local _, bucket = clock()
  remember_released(done, bucket)
  if #gone > 0 then
    apply_moves()
    call('HDEL', LEDGER, unpack(gone))
  end
  return {1, seq, #gone, unpack(left)}
end
