-- machines: compare the machines of limits, and since when frames run, with what is counted there.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 'heal' to put right what differs, or 'look', then threes (at most 250): limit, machine ('' of a limit
--         of frames), and '' or a proc that may be counted there
-- Returns {1, numbers of the threes that differ...}, negative where only starts of procs are noted that are there no more
--         (a worker of the release before has released them), or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: a machine is one of its limit exactly if frames are counted there; as many starts are known as frames are
--         counted; a proc is among them exactly if its entry lists the limit so. No counter is written, but one that is no
--         number. What should be a sorted set and is none differs each time, and is made anew. A machine whose last frame
--         ended an hour ago is forgotten.
--@include ledger
--@include counters
local FORGOTTEN_SECONDS = 3600
local answer, heal = {1}, ARGV[2] == 'heal'
local now = tonumber((clock()))

-- The score of a member, 0 for none; of what is no sorted set nil, and it goes.
local function score_of(key, member)
  local score = try('ZSCORE', key, member)
  if type(score) == 'table' then
    if heal then call('UNLINK', key) end
    return nil
  end
  return tonumber(score or 0)
end

-- Whether the machine is one of the limit as its counter says.
local function right_machine(key, limit, machine)
  local set, frames = 'acct:machines:' .. limit, counters(key, 'int_running')[1]
  local score = score_of(set, machine)
  local right = score and (frames > 0) == (score > 0)
  if heal and not right then add_frames(key, 0) end
  if heal and right and score < 0 and now + score > FORGOTTEN_SECONDS then call('ZREM', set, machine) end
  return right, frames
end

for i = 3, #ARGV, 3 do
  local limit, machine, id = ARGV[i], ARGV[i + 1], ARGV[i + 2]
  local listed = limit .. '@' .. machine
  local key, started, right = 'acct:limit:' .. listed, 'acct:started:' .. limit .. (machine ~= '' and '@' .. machine or '')
  if id ~= '' then
    local _, booked, _, limits = string.match(call('HGET', LEDGER, id) or '', '^1|([FC])|(%d+)|(%d+)|.*|([^|]*)$')
    local counts = limits and string.find(',' .. limits .. ',', ',' .. listed .. ',', 1, true)
    local score = score_of(started, id)
    right = score and (counts and true or false) == (score > 0)
    if heal and not right then
      if counts then call('ZADD', started, booked, id) else call('ZREM', started, id) end
      if machine ~= '' then add_frames(key, 0) end
    end
  else
    local frames
    if machine ~= '' then
      right, frames = right_machine(key, limit, machine)
    else
      right, frames = true, counters(key, 'int_running')[1]
    end
    local size = try('ZCARD', started)
    local is_set = type(size) ~= 'table'
    if right and is_set and size > math.max(0, frames) then answer[#answer + 1] = -i / 3 end
    right = right and is_set and size >= math.max(0, frames)
    if heal and not is_set then call('UNLINK', started) end
  end
  if not right then answer[#answer + 1] = i / 3 end
end
return answer
