-- Sums up entries per vertex and moves each vertex once. Needs includes/ledger.
local moves = {}

local function move_key(key, cores, gpus)
  local sum = moves[key]
  if sum then
    sum[1], sum[2] = sum[1] + cores, sum[2] + gpus
  else
    moves[key] = {cores, gpus}
  end
end

-- Count an entry in (sign 1) or out (sign -1).
local function move(entry, sign)
  local cores, gpus, show, alloc, folder, job, layer, dept, limits = string.match(entry, ENTRY)
  if not cores then
    error('malformed ledger entry: ' .. entry)
  end
  cores, gpus = cores * sign, gpus * sign
  if alloc ~= '' then move_key('acct:sub:' .. show .. ':' .. alloc, cores, gpus) end
  if folder ~= '' then move_key('acct:folder:' .. folder, cores, gpus) end
  if job ~= '' then move_key('acct:job:' .. job, cores, gpus) end
  if layer ~= '' then move_key('acct:layer:' .. layer, cores, gpus) end
  if dept ~= '' then move_key('acct:point:' .. dept .. ':' .. show, cores, gpus) end
  for limit in string.gmatch(limits, '[^,]+') do
    move_key('acct:limit:' .. limit, sign, 0)
  end
end

-- Reads and adds up everything before the first write, so that a vertex somebody spoilt stops the script in time.
local function apply_moves(seq)
  local rows = {}
  for key, sum in pairs(moves) do
    if string.sub(key, 1, 11) == 'acct:limit:' then
      rows[#rows + 1] = {key, 'int_running', (call('HGET', key, 'int_running') or 0) + sum[1], 'seq', seq}
    else
      local now = call('HMGET', key, 'int_cores', 'int_gpus', 'ledger_cores', 'ledger_gpus')
      rows[#rows + 1] = {key, 'int_cores', (now[1] or 0) + sum[1], 'int_gpus', (now[2] or 0) + sum[2],
        'ledger_cores', (now[3] or 0) + sum[1], 'ledger_gpus', (now[4] or 0) + sum[2], 'seq', seq}
    end
  end
  for _, row in ipairs(rows) do
    call('HSET', unpack(row))
  end
end
