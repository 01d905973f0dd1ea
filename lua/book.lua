-- book: count one proc at its vertices, or take exactly that proc out again.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch
-- ARGV    1 epoch, 2 mode: 'check' (caps decide) or 'force' (they do not), 3 pk_proc, 4 owner,
--         5 entry (includes/ledger); with force a negative number of cores or GPUs is a rollback
-- Returns {1, seq}; {1, seq, 'already'} when the id is in the ledger (check, force) or is not (rollback): nothing moved.
--         {0, table, current, limit} as text: 'subscription', 'folder', 'job', 'folder_gpus', 'job_gpus', 'limit',
--         or {0, 'not_ready', stored epoch, '0'}, {0, 'unseeded', vertex key, '0'}, {0, 'tombstoned', pk_proc, '0'}.
-- Invariants: counters and ledger move together or not at all; an id is counted once however often it is booked, and
--         never again after its release; the burst always binds, folder and job caps when above 0, every limit of the
--         layer; cores are checked only when cores are asked for, GPUs only when GPUs are.
--@include ledger
--@include moves
if not ready() then
  return {0, 'not_ready', call('GET', EPOCH) or '', '0'}
end
local mode, id, owner, entry = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
local cores, gpus, show, alloc, folder, job, layer, dept, limits = string.match(entry, ENTRY)
if not cores then
  return redis.error_reply('malformed ledger entry: ' .. entry)
end
cores, gpus = tonumber(cores), tonumber(gpus)
local known = call('HGET', LEDGER, id)
local ms, bucket = clock()

if mode == 'force' and (cores < 0 or gpus < 0) then
  if not known then
    bury({id}, bucket)
    return {1, tonumber(call('GET', SEQ) or 0), 'already'}
  end
  local seq = call('INCR', SEQ)
  local _, _, _, _, booked = string.match(known, RECORD)
  move(booked, -1)
  apply_moves(seq)
  call('HDEL', LEDGER, id)
  bury({id}, bucket)
  return {1, seq}
end

if known then
  local _, _, changed = string.match(known, RECORD)
  return {1, tonumber(changed), 'already'}
end
if tombstoned(id, bucket) then
  return {0, 'tombstoned', id, '0'}
end

local sub_key = alloc ~= '' and 'acct:sub:' .. show .. ':' .. alloc
local folder_key = folder ~= '' and 'acct:folder:' .. folder
local job_key = job ~= '' and 'acct:job:' .. job
local layer_key = layer ~= '' and 'acct:layer:' .. layer
local point_key = dept ~= '' and 'acct:point:' .. dept .. ':' .. show

local function read(key, ...)
  return key and call('HMGET', key, 'int_cores', 'int_gpus', 'ledger_cores', 'ledger_gpus', ...)
end

local sub = read(sub_key, 'burst')
local fold = read(folder_key, 'int_max_cores', 'int_max_gpus')
local jobs = read(job_key, 'int_max_cores', 'int_max_gpus')
local layers = read(layer_key)
local points = read(point_key)

local function over(amount, now, cap)
  return amount > 0 and tonumber(cap) > 0 and (now or 0) + amount > tonumber(cap)
end

if mode ~= 'force' then
  if sub and not sub[5] then return {0, 'unseeded', sub_key, '0'} end
  if fold and not (fold[5] and fold[6]) then return {0, 'unseeded', folder_key, '0'} end
  if jobs and not (jobs[5] and jobs[6]) then return {0, 'unseeded', job_key, '0'} end
  if sub and cores > 0 and (sub[1] or 0) + cores > tonumber(sub[5]) then
    return {0, 'subscription', sub[1] or '0', sub[5]}
  end
  if fold and over(cores, fold[1], fold[5]) then return {0, 'folder', fold[1] or '0', fold[5]} end
  if jobs and over(cores, jobs[1], jobs[5]) then return {0, 'job', jobs[1] or '0', jobs[5]} end
  if fold and over(gpus, fold[2], fold[6]) then return {0, 'folder_gpus', fold[2] or '0', fold[6]} end
  if jobs and over(gpus, jobs[2], jobs[6]) then return {0, 'job_gpus', jobs[2] or '0', jobs[6]} end
  for limit in string.gmatch(limits, '[^,]+') do
    local key = 'acct:limit:' .. limit
    local now = call('HMGET', key, 'int_running', 'int_max_value', 'int_foreign')
    if not now[2] then return {0, 'unseeded', key, '0'} end
    local cap = now[2] - (now[3] or 0)
    if (now[1] or 0) + 1 > cap then return {0, 'limit', now[1] or '0', tostring(cap)} end
  end
end

local seq = call('INCR', SEQ)

local function count(key, now)
  call('HSET', key, 'int_cores', (now[1] or 0) + cores, 'int_gpus', (now[2] or 0) + gpus,
    'ledger_cores', (now[3] or 0) + cores, 'ledger_gpus', (now[4] or 0) + gpus, 'seq', seq)
end

if sub then count(sub_key, sub) end
if fold then count(folder_key, fold) end
if jobs then count(job_key, jobs) end
if layers then count(layer_key, layers) end
if points then count(point_key, points) end
for limit in string.gmatch(limits, '[^,]+') do
  call('HINCRBY', 'acct:limit:' .. limit, 'int_running', 1)
  call('HSET', 'acct:limit:' .. limit, 'seq', seq)
end
call('HSET', LEDGER, id, record_of('F', ms, seq, owner, entry))
return {1, seq}
