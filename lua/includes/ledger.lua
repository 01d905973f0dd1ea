-- The ledger, shared by every accounting script.
-- KEYS of all of them: 1 acct:seq, 2 acct:ledger, 3 acct:epoch. ARGV[1] is the epoch the caller knows.
-- The vertex keys are derived from the entries (the ledger is the only one to know them on release), so acct:* lives on
-- one node: Sentinel, not Cluster.
--
-- Keyspace (whole cores; GPUs and frames are units):
--   acct:sub:{show}:{alloc}, acct:folder:{folder}, acct:job:{job}, acct:layer:{layer}, acct:point:{dept}:{show}
--     hashes: the caps of the seed, int_cores, int_gpus, and beside them
--     ledger_cores, ledger_gpus   what the ledger alone accounts for; a plain HINCRBY of somebody else moves only int_*
--     seq                         acct:seq when a ledger script last moved this vertex
--   acct:limit:{limit}            hash: int_max_value, int_foreign, int_running (frames), seq
--   acct:ledger                   hash: pk_proc -> record
--   acct:tomb:{bucket}            set of released pk_procs; a bucket is TOMB_WIDTH seconds of Redis TIME
--   acct:epoch, acct:seq          strings
--
-- An entry is  cores|gpus|show|alloc|folder|job|layer|dept|limit,limit  (an empty id: no such vertex);
-- a record is  1|state|booked-at ms|changed seq|owner|entry  with state F (in flight) or C (confirmed).
local SEQ, LEDGER, EPOCH = KEYS[1], KEYS[2], KEYS[3]
local TOMB_WIDTH = 300
local ENTRY = '^(%-?%d+)|(%-?%d+)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)$'
local RECORD = '^1|(%a)|(%d+)|(%d+)|([^|]*)|(.*)$'
local call = redis.call

local function ready()
  return call('GET', EPOCH) == ARGV[1]
end

-- Milliseconds of Redis TIME, and the tombstone bucket of now.
local function clock()
  local t = call('TIME')
  return t[1] * 1000 + math.floor(t[2] / 1000), math.floor(t[1] / TOMB_WIDTH)
end

local function tombstoned(id, bucket)
  return call('SISMEMBER', 'acct:tomb:' .. bucket, id) == 1 or call('SISMEMBER', 'acct:tomb:' .. (bucket - 1), id) == 1
end

-- Remember released ids for one to two bucket widths. Old buckets are unlinked here rather than left to expire: Redis
-- frees an expired set in the foreground.
local function bury(ids, bucket)
  if #ids > 0 then
    call('SADD', 'acct:tomb:' .. bucket, unpack(ids))
    call('EXPIRE', 'acct:tomb:' .. bucket, TOMB_WIDTH * 3)
  end
  call('UNLINK', 'acct:tomb:' .. (bucket - 2), 'acct:tomb:' .. (bucket - 3))
end

local function record_of(state, ms, seq, owner, entry)
  return string.format('1|%s|%.0f|%.0f|%s|%s', state, ms, seq, owner, entry)
end
