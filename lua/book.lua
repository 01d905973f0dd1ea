-- book: count one proc at its vertices, or take exactly that proc out again.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 mode: 'check' (caps decide) or 'force' (they do not), 3 pk_proc, 4 owner,
--         5 cores, 6 GPUs, 7 show, 8 alloc, 9 folder, 10 job, 11 layer, 12 dept, 13 limits joined by commas,
--         14 machine, where there are limits ('': unknown)
--         With force, negative cores or GPUs are a rollback.
-- Returns {1, seq}, and behind that {..., 'under', limit, terms, ...} of each limit that counts machines, is reported or
--         is not enforced, as its row was when this was decided; {1, 0, 'already'} when the id is in the ledger (check, force) or is not (rollback): nothing moved.
--         {0, table, current, limit} as text: 'subscription', 'folder', 'job', 'folder_gpus', 'job_gpus', 'limit',
--         or {0, 'not_ready', stored epoch, '0'}, {0, 'unseeded', vertex key, '0'}, {0, 'tombstoned', pk_proc, '0'}.
-- Invariants: counters and ledger move together or not at all; an id is counted once however often it is booked, and
--         not again after its release; the burst always binds, folder and job caps when above 0, every limit of the
--         layer; cores are checked only when cores are asked for, GPUs only when GPUs are. A limit that counts machines
--         refuses a machine that does not hold it, once as many hold it as may. A frame whose machine is unknown counts
--         as one more.
--@include ledger
local id, cores, gpus, limits = ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[6]), ARGV[13]
if ARGV[2] == 'force' and (cores < 0 or gpus < 0) then
  -- Included only here: to make these functions takes a tenth of the time of a booking, which needs none of them.
--@include moves
  local released = release({id})
  return released[3] > 0 and {1, released[2]} or {1, 0, 'already'}
end
local now, bucket = clock()
if tombstoned(id, bucket) then
  return {0, 'tombstoned', id, '0'}
end
local keys = vertices(ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12])

-- The first cap in the way of this booking, or nil. GPU fields are read only for GPUs: every field costs, and so does
-- every local of the script that a function uses without being given it.
local function refusal(keys, cores, gpus)
  for i = 1, 3 do
    local key, cap_field = keys[i], i == 1 and 'burst' or 'int_max_cores'
    if key then
      local read = gpus > 0 and call('HMGET', key, 'int_cores', cap_field, 'int_gpus', 'int_max_gpus')
        or call('HMGET', key, 'int_cores', cap_field)
      if not read[2] then return {0, 'unseeded', key, '0'} end
      local cap, name = tonumber(read[2]), i == 1 and 'subscription' or i == 2 and 'folder' or 'job'
      if cores > 0 and (cap > 0 or cap_field == 'burst') and (read[1] or 0) + cores > cap then
        return {0, name, read[1] or '0', read[2]}
      end
      if gpus > 0 and tonumber(read[4] or 0) > 0 and (read[3] or 0) + gpus > tonumber(read[4]) then
        return {0, name .. '_gpus', read[3] or '0', read[4]}
      end
    end
  end
end

local checked = ARGV[2] ~= 'force'
local refused = checked and refusal(keys, cores, gpus)
local under
if not refused and limits ~= '' then
  -- Hundreds of machines may hold a limit: for all limits together a call reads so many of their counters.
  local machine, listed, may_read = ARGV[14] or '', {}, 100
  ARGV[14] = nil
  for limit in string.gmatch(limits, '[^,]+') do
    local key = 'acct:limit:' .. limit
    local read = call('HMGET', key, 'int_running', 'int_max_value', 'int_foreign', 'int_machines', 'terms')
    listed[#listed + 1] = limit
    if (read[4] or '') ~= '' or (read[5] or '') ~= '' then
      -- Included only here, as above.
--@include seats
      local more = call('HMGET', key, 'after', 'int_frames', 'int_settled')
      local after, most, use = more[1] or '', tonumber(read[4] or ''), nil
      under = under or {'under'}
      under[#under + 1], under[#under + 2] = limit, read[5] or ''
      if most and machine ~= '' then
        listed[#listed + 1], listed[#listed + 2] = limit .. '@', limit .. '@' .. machine
      elseif not most and after ~= '' then
        listed[#listed + 1] = limit .. '@'
      end
      if most then
        use = checked and most >= 0 and machines_refuse(limit, machine, read[1] or 0, most, tonumber(read[2]), after)
      else
        most = tonumber(more[2])
        use = checked and most >= 0 and frames_refuse(limit, read[1] or 0, most, tonumber(more[3]), after)
      end
      refused = use and {0, 'limit', tostring(use), tostring(most)}
    elseif checked and not read[2] then
      refused = {0, 'unseeded', key, '0'}
    elseif checked then
      local cap = read[2] - (read[3] or 0)
      refused = (read[1] or 0) + 1 > cap and {0, 'limit', read[1] or '0', tostring(cap)}
    end
    if refused then break end
  end
  ARGV[13] = table.concat(listed, ',')
end
if refused then
  return call('HEXISTS', LEDGER, id) == 1 and {1, 0, 'already'} or refused
end
-- From the owner on ARGV is what a record ends with: with its first three replaced, one concatenation makes the record.
local seq = call('INCR', SEQ)
if seq < 1 or seq > 999999999999999 then error('acct:seq cannot be used') end -- as includes/seq.lua says
ARGV[1], ARGV[2], ARGV[3] = '1|F', now, seq
if call('HSETNX', LEDGER, id, table.concat(ARGV, '|')) == 0 then
  return {1, 0, 'already'}
end
-- As count() of includes/moves counts, and add() as its first step, but without a call of either, nor a number made of
-- text, at each of five vertices: that cost a booking as much as a command of Redis.
for i = 1, 5 do
  local key = keys[i]
  if key then
    local sum = try('HINCRBY', key, 'int_cores', ARGV[5])
    if type(sum) == 'table' then spoil(key, 'int_cores') end
    if sum == cores or gpus ~= 0 then add(key, 'int_gpus', gpus) end
    if DUAL then
      add(key, 'ledger_cores', ARGV[5])
      add(key, 'ledger_gpus', gpus)
    end
  end
end
if limits ~= '' then
  for limit in string.gmatch(ARGV[13], '[^,]+') do add('acct:limit:' .. limit, 'int_running', '1') end
  if string.find(ARGV[13], '@', 1, true) then
--@include machines
    note_start(id, ARGV[13], now)
    -- A machine comes with its first frame: as add_frames() does, but this frame is the last.
    for limit, machine in string.gmatch(ARGV[13], '([^,@]+)@([^,]+)') do
      try('ZADD', 'acct:machines:' .. limit, 'GT', now, machine)
    end
  end
end
if AUDITING then call('RPUSH', AUDIT_LOG, seq .. '|+|' .. id .. '|' .. table.concat(ARGV, '|', 5)) end
return under and {1, seq, unpack(under)} or {1, seq}
