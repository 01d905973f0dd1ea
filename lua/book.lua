-- book: count one proc at its vertices, or take exactly that proc out again.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 mode: 'check' (caps decide) or 'force' (they do not), 3 pk_proc, 4 owner,
--         5 cores, 6 GPUs, 7 show, 8 alloc, 9 folder, 10 job, 11 layer, 12 dept, 13 limits joined by commas
--         With force, negative cores or GPUs are a rollback.
-- Returns {1, seq}; {1, 0, 'already'} when the id is in the ledger (check, force) or is not (rollback): nothing moved.
--         {0, table, current, limit} as text: 'subscription', 'folder', 'job', 'folder_gpus', 'job_gpus', 'limit',
--         or {0, 'not_ready', stored epoch, '0'}, {0, 'unseeded', vertex key, '0'}, {0, 'tombstoned', pk_proc, '0'}.
-- Invariants: counters and ledger move together or not at all; an id is counted once however often it is booked, and
--         not again after its release; the burst always binds, folder and job caps when above 0, every limit of the
--         layer; cores are checked only when cores are asked for, GPUs only when GPUs are.
--@include ledger
local id, cores, gpus = ARGV[3], tonumber(ARGV[5]), tonumber(ARGV[6])
local now, bucket = clock()

-- Why a folder or job refuses, or nil. GPU fields are read only for GPUs: every field costs.
local function full(key, name)
  local read
  if gpus > 0 then
    read = call('HMGET', key, 'int_cores', 'int_max_cores', 'int_gpus', 'int_max_gpus')
  else
    read = call('HMGET', key, 'int_cores', 'int_max_cores')
  end
  if not read[2] then return {0, 'unseeded', key, '0'} end
  local cap = tonumber(read[2])
  if cores > 0 and cap > 0 and (read[1] or 0) + cores > cap then
    return {0, name, read[1] or '0', read[2]}
  end
  if gpus > 0 and tonumber(read[4] or 0) > 0 and (read[3] or 0) + gpus > tonumber(read[4]) then
    return {0, name .. '_gpus', read[3] or '0', read[4]}
  end
end

-- The first cap in the way of this booking, or nil.
local function refusal(sub, folder, job, limits)
  if sub then
    local read = call('HMGET', sub, 'int_cores', 'burst')
    if not read[2] then return {0, 'unseeded', sub, '0'} end
    if cores > 0 and (read[1] or 0) + cores > tonumber(read[2]) then
      return {0, 'subscription', read[1] or '0', read[2]}
    end
  end
  local refused = folder and full(folder, 'folder') or job and full(job, 'job')
  if refused then return refused end
  if limits == '' then return nil end
  for limit in string.gmatch(limits, '[^,]+') do
    local key = 'acct:limit:' .. limit
    local read = call('HMGET', key, 'int_running', 'int_max_value', 'int_foreign')
    if not read[2] then return {0, 'unseeded', key, '0'} end
    local cap = read[2] - (read[3] or 0)
    if (read[1] or 0) + 1 > cap then return {0, 'limit', read[1] or '0', tostring(cap)} end
  end
end

-- Move one vertex. A GPU count of 0 is written only to a vertex that has none yet.
local function count(key, more_cores, more_gpus)
  if add(key, 'int_cores', more_cores) == cores or gpus ~= 0 then
    add(key, 'int_gpus', more_gpus)
  end
  if DUAL then
    add(key, 'ledger_cores', more_cores)
    add(key, 'ledger_gpus', more_gpus)
  end
end

local function count_all(more_cores, more_gpus, show, alloc, folder, job, layer, dept, limits, frames)
  if alloc ~= '' then count('acct:sub:' .. show .. ':' .. alloc, more_cores, more_gpus) end
  if folder ~= '' then count('acct:folder:' .. folder, more_cores, more_gpus) end
  if job ~= '' then count('acct:job:' .. job, more_cores, more_gpus) end
  if layer ~= '' then count('acct:layer:' .. layer, more_cores, more_gpus) end
  if dept ~= '' then count('acct:point:' .. dept .. ':' .. show, more_cores, more_gpus) end
  if limits == '' then return end
  for limit in string.gmatch(limits, '[^,]+') do
    add('acct:limit:' .. limit, 'int_running', frames)
  end
end

local force = ARGV[2] == 'force'
if force and (cores < 0 or gpus < 0) then
  local record = call('HGET', LEDGER, id)
  remember_released({id}, bucket)
  if not record then
    return {1, 0, 'already'}
  end
  local seq = call('INCR', SEQ)
  local _, _, _, _, entry = string.match(record, RECORD)
  local c, g, show, alloc, folder, job, layer, dept, limits = string.match(entry or '', ENTRY)
  if c then
    cores, gpus = -c, -g
    count_all(string.format('%d', cores), string.format('%d', gpus), show, alloc, folder, job, layer, dept, limits, '-1')
  end
  call('HDEL', LEDGER, id)
  if AUDITING and c then
    call('RPUSH', AUDIT_LOG, seq .. '|-|' .. id .. '|' .. entry)
  end
  return {1, seq}
end
if tombstoned(id, bucket) then
  return {0, 'tombstoned', id, '0'}
end
if not force then
  local refused = refusal(
    ARGV[8] ~= '' and 'acct:sub:' .. ARGV[7] .. ':' .. ARGV[8], ARGV[9] ~= '' and 'acct:folder:' .. ARGV[9],
    ARGV[10] ~= '' and 'acct:job:' .. ARGV[10], ARGV[13])
  if refused then
    return call('HEXISTS', LEDGER, id) == 1 and {1, 0, 'already'} or refused
  end
end

local seq = call('INCR', SEQ)
local entry = table.concat(ARGV, '|', 5)
if call('HSETNX', LEDGER, id, record_of('F', now, seq, ARGV[4], entry)) == 0 then
  return {1, 0, 'already'}
end
count_all(ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9], ARGV[10], ARGV[11], ARGV[12], ARGV[13], '1')
if AUDITING then
  call('RPUSH', AUDIT_LOG, seq .. '|+|' .. id .. '|' .. entry)
end
return {1, seq}
