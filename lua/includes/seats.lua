-- Whether a limit refuses a frame: a limit that counts machines, or one of frames that a licence server reports. (Any other
-- limit that is enforced is a maximum and a counter.) What started after the limit's `after` (seconds of Redis TIME) its last
-- report need not show; of a limit that was never reported it is empty, and everything counts. Each function answers the use
-- that is too much, or nil. accounting/seats.py tells the planner by the same rules. Needs includes/ledger, and may_read: so
-- many counters of machines may be read.

-- Whether a machine has confirmed frames. By frames in flight alone it counts and does not hold a limit: those may have been
-- accepted before the maximum was lowered, or artists came, and are not committed then. The oldest are in flight least often,
-- and more are not read: a machine on which so many are in flight holds nothing until one of them is committed.
local function runs_there(limit, machine)
  for _, id in ipairs(try('ZRANGE', 'acct:started:' .. limit .. '@' .. machine, 0, 9)) do
    if string.sub(call('HGET', LEDGER, id) or '', 1, 4) == '1|C|' then return true end
  end
end

-- A limit of machines is used by the machines that are reported or have younger frames, and by frames whose machine is
-- unknown. Below the threshold any machine may start; from there on one that holds it, with whatever frames; and above the
-- maximum as many machines of ours as are too many take no more, the last by name, which are the same for everybody.
local function machines_refuse(limit, machine, running, threshold, maximum, after)
  local key, holding = 'acct:limit:' .. limit .. '@', 'acct:machines:' .. limit
  local others, bound = holding .. ':others', '(' .. (after ~= '' and after or 0)
  -- Entries from when the limit counted frames do not have their machine, and have since when they run.
  local dated = try('ZCARD', 'acct:started:' .. limit)
  local unknown = running - (call('HGET', key, 'int_running') or 0) + (type(dated) == 'number' and dated or 0)
  local use = call('ZCOUNT', holding, bound, '+inf') + call('SCARD', others) + math.max(0, unknown)
  if use < threshold then return end
  -- A machine that is in both sets counts once, and so does this machine, if a worker of the release before left it in the set.
  -- To read their names takes longer than to count them, and they matter only here.
  local frames = tonumber(call('HGET', key .. machine, 'int_running') or 0)
  local reported = call('SISMEMBER', others, machine) == 1
  local since_bound, ours, by_both_since = tonumber(after ~= '' and after or 0), {}, {}
  local by_both = call('ZINTER', 2, holding, others, 'WEIGHTS', 1, 0, 'WITHSCORES')
  for i = 1, #by_both, 2 do
    local since = tonumber(by_both[i + 1])
    if since > since_bound then
      by_both_since[by_both[i]] = true
      use = use - 1
    elseif since > 0 or (after ~= '' and -since > tonumber(after)) then
      ours[#ours + 1] = by_both[i]
    end
  end
  local runs = frames > 0 and runs_there(limit, machine)
  local counted_alone = not runs and tonumber(call('ZSCORE', holding, machine) or 0) > since_bound
  if use - (counted_alone and 1 or 0) < threshold then return end
  local holds = runs or reported or call('SISMEMBER', holding .. ':past', machine) == 1
  if not holds then return use end
  if use <= maximum then return end
  -- Ours are those with frames, and those that are reported still though their last frame has ended since. Of one that is
  -- reported for somebody else's sake nothing is to be had. Only a worker of the release before leaves one without frames in
  -- the set, so one whose counter there is no time to read is taken for one with frames: at worst fewer go on.
  for _, name in ipairs(call('ZRANGEBYSCORE', holding, bound, '+inf')) do
    local known = by_both_since[name] or may_read == 0
    may_read = known and may_read or may_read - 1
    if known or tonumber(call('HGET', key .. name, 'int_running') or 0) > 0 then
      ours[#ours + 1] = name
    else
      use = use - 1
    end
  end
  if use <= maximum then return end
  table.sort(ours)
  for i = 1, #ours - (use - maximum) do
    if ours[i] == machine then return end
  end
  return use
end

-- A limit of frames is used by the tokens that are reported, and by younger frames.
local function frames_refuse(limit, running, most, settled, after)
  -- Entries from when the limit counted machines are counted as known, and are not among the starts.
  local started = 'acct:started:' .. limit
  local known = tonumber(call('HGET', 'acct:limit:' .. limit .. '@', 'int_running') or 0)
  known = math.min(known, call('ZCARD', started))
  local pending = math.min(known, call('ZCOUNT', started, '(' .. after, '+inf'))
  local use = settled + pending + math.max(0, running - known)
  return use >= most and use or nil
end
