-- Sums up entries per vertex and moves each vertex once. Needs includes/ledger.
-- What a call does is bounded in commands of Redis, as in opencue_sched/accounting/ledger.py.
local WORK, WORK_OF_AN_ID, WORK_OF_A_VERTEX = 400, 6, DUAL and 6 or 2
local moves, moved = {}, {}

local function move_key(key, cores, gpus, ledger_only)
  local sum = moves[key]
  if not sum then
    sum = {0, 0, 0, 0}
    moves[key] = sum
  end
  sum[3], sum[4] = sum[3] + cores, sum[4] + gpus
  if ledger_only then
    sum.dropped = true
  else
    sum[1], sum[2] = sum[1] + cores, sum[2] + gpus
  end
end

-- Count the entry of a proc in (sign 1) or out (sign -1). An unreadable entry (or nil) goes out without touching counters,
-- so that it cannot block the others of its call; the consistency check puts its counters right. With ledger_only the
-- int_* fields stay: in a dual store the other program takes the cores of a proc it deleted off them itself.
local function move(id, entry, sign, ledger_only)
  local cores, gpus, show, alloc, folder, job, layer, dept, limits = string.match(entry or '', ENTRY)
  if not cores then
    if sign < 0 then return end
    error('malformed ledger entry: ' .. entry)
  end
  cores, gpus = sign * cores, sign * gpus
  if alloc ~= '' then move_key('acct:sub:' .. show .. ':' .. alloc, cores, gpus, ledger_only) end
  if folder ~= '' then move_key('acct:folder:' .. folder, cores, gpus, ledger_only) end
  if job ~= '' then move_key('acct:job:' .. job, cores, gpus, ledger_only) end
  if layer ~= '' then move_key('acct:layer:' .. layer, cores, gpus, ledger_only) end
  if dept ~= '' then move_key('acct:point:' .. dept .. ':' .. show, cores, gpus, ledger_only) end
  for limit in string.gmatch(limits, '[^,]+') do
    move_key('acct:limit:' .. limit, sign, 0)
  end
  if AUDITING then
    moved[#moved + 1] = (sign > 0 and '+|' or '-|') .. id .. '|' .. entry
  end
end

-- Adding 0 turns -0, which HINCRBY does not read, into 0. GPUs of 0 are written only to a vertex that is new.
local function apply_moves(seq)
  local now = DUAL and call('TIME')[1]
  for key, sum in pairs(moves) do
    if string.sub(key, 1, 11) == 'acct:limit:' then
      add(key, 'int_running', sum[1] + 0)
    else
      if add(key, 'int_cores', sum[1] + 0) == sum[1] or sum[2] ~= 0 then
        add(key, 'int_gpus', sum[2] + 0)
      end
      if DUAL then
        add(key, 'ledger_cores', sum[3] + 0)
        add(key, 'ledger_gpus', sum[4] + 0)
      end
      if sum.dropped then
        call('HSET', key, 'dropped_at', now)
      end
    end
  end
  for _, line in ipairs(moved) do
    call('RPUSH', AUDIT_LOG, seq .. '|' .. line)
  end
end
