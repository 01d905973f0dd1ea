-- The counters of a vertex, whatever it counts and whatever another program wrote there. Needs includes/ledger.
--@include machines

-- The fields as numbers, 0 for one that is not there. A damaged field becomes SPOILT. A key of another type is deleted, and
-- seeded when the vertex is booked.
local function counters(key, ...)
  local read = redis.pcall('HMGET', key, ...)
  if read.err then
    call('UNLINK', key)
    read = {}
  end
  for i, field in ipairs({...}) do
    if read[i] and not (string.match(read[i], '^%-?%d+$') and #read[i] < 16) then
      call('HSET', key, field, SPOILT)
      read[i] = SPOILT
    end
    read[i] = tonumber(read[i] or 0)
  end
  return read
end

-- Add cores and GPUs to a vertex; frames, which come first, to a limit.
local function add_to(key, cores, gpus)
  if string.sub(key, 1, 11) == 'acct:limit:' then
    add_frames(key, cores)
  else
    add(key, 'int_cores', cores)
    add(key, 'int_gpus', gpus)
  end
end
