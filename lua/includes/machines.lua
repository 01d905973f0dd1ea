-- The machines of limits that count machines, and since when frames run. A limit L that counts machines counts its frames at
-- acct:limit:L as any other, those of them whose machine is known at acct:limit:L@ too, and those on machine M at
-- acct:limit:L@M: an entry lists all three. An entry under a limit of frames of which a licence server reports lists L and
-- L@. Needs includes/ledger.
--   acct:started:L@M, acct:started:L   sorted set: each proc that is counted there, by when it was booked
--   acct:machines:L                    sorted set: each M that has such frames, by when the last of them was booked; one
--                                      that had some, by when the last ended, below 0

-- Add frames to a counter of a limit. A machine comes with its first frame and goes with its last. A set that another
-- program made something else does not end a script in the midst of its work: nothing is booked by it until a recompute
-- has made it anew. What the set of starts lacks has started now.
local function add_frames(key, more)
  local sum = add(key, 'int_running', more)
  local limit, machine = string.match(key, '^acct:limit:([^@]*)@(.+)$')
  if not limit then return end
  local machines, started = 'acct:machines:' .. limit, 'acct:started:' .. limit .. '@' .. machine
  if type(sum) == 'table' or sum > 0 then
    local last = try('ZREVRANGE', started, 0, 0, 'WITHSCORES')
    try('ZADD', machines, last[2] or clock(), machine)
  else
    local score = try('ZSCORE', machines, machine)
    if type(score) == 'string' and tonumber(score) > 0 then try('ZADD', machines, '-' .. clock(), machine) end
    if sum == 0 then call('UNLINK', key, started) end
  end
end

-- Note since when a proc is counted under the limits of its entry, or (booked: nil) that it is no more.
local function note_start(id, limits, booked)
  for limit, machine in string.gmatch(limits, '([^,@]+)@([^,]*)') do
    local key = 'acct:started:' .. limit
    if machine ~= '' then
      key = key .. '@' .. machine
    elseif string.find(limits, limit .. '@,' .. limit .. '@', 1, true) then
      key = nil
    end
    if key and booked then
      try('ZADD', key, booked, id)
    elseif key then
      try('ZREM', key, id)
    end
  end
end
