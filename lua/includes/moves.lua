-- Sums up entries per vertex and moves each vertex once. Needs includes/ledger.
local moves, moved = {}, {}

local function move_key(key, cores, gpus)
  local sum = moves[key]
  if sum then
    sum[1], sum[2] = sum[1] + cores, sum[2] + gpus
  else
    moves[key] = {cores, gpus}
  end
end

-- Count the entry of a proc in (sign 1) or out (sign -1).
local function move(id, entry, sign)
  local cores, gpus, show, alloc, folder, job, layer, dept, limits = string.match(entry, ENTRY)
  if not cores then
    error('malformed ledger entry: ' .. entry)
  end
  cores, gpus = 0 + sign * cores, 0 + sign * gpus -- 0 + turns -0 into 0, which HINCRBY would not read
  if alloc ~= '' then move_key('acct:sub:' .. show .. ':' .. alloc, cores, gpus) end
  if folder ~= '' then move_key('acct:folder:' .. folder, cores, gpus) end
  if job ~= '' then move_key('acct:job:' .. job, cores, gpus) end
  if layer ~= '' then move_key('acct:layer:' .. layer, cores, gpus) end
  if dept ~= '' then move_key('acct:point:' .. dept .. ':' .. show, cores, gpus) end
  for limit in string.gmatch(limits, '[^,]+') do
    move_key('acct:limit:' .. limit, sign, 0)
  end
  if AUDITING then
    moved[#moved + 1] = (sign > 0 and '+|' or '-|') .. id .. '|' .. entry
  end
end

local function apply_moves(seq)
  for key, sum in pairs(moves) do
    if string.sub(key, 1, 11) == 'acct:limit:' then
      call('HINCRBY', key, 'int_running', sum[1])
    else
      call('HINCRBY', key, 'int_cores', sum[1])
      call('HINCRBY', key, 'int_gpus', sum[2])
      if DUAL then
        call('HINCRBY', key, 'ledger_cores', sum[1])
        call('HINCRBY', key, 'ledger_gpus', sum[2])
      end
    end
  end
  for _, line in ipairs(moved) do
    call('RPUSH', AUDIT_LOG, seq .. '|' .. line)
  end
end
