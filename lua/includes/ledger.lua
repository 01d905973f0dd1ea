-- The ledger, shared by every accounting script. Redis makes each function here anew at every call of a script, so what
-- a booking does not need is in includes/moves.lua.
-- KEYS of all of them: 1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit. ARGV[1] is the epoch the caller knows.
-- Vertex keys are derived from entries (on release only the ledger knows them), so acct:* is on one node: no Cluster.
-- KEYS[5] and the last of ARGV of a periodic task are as includes/fence.lua says.
--
-- Keyspace (whole cores; GPUs and frames are units):
--   acct:sub:{show}:{alloc}, acct:folder:{folder}, acct:job:{job}, acct:layer:{layer}, acct:point:{dept}:{show}
--     hashes: the caps of the seed, caps_at (their version: server|number), int_cores, int_gpus. In a dual store (below) also
--     ledger_cores, ledger_gpus: what the ledger alone accounts for; another program's plain HINCRBY moves only int_*;
--     foreign_cores, foreign_gpus, dropped_at: see foreign
--   acct:limit:{limit}   hash: int_max_value, int_foreign, caps_at, int_running (frames); of one that counts machines also
--                        int_machines (so many may hold it, -1: any number), terms (what else its row says) and
--                        opens_at (epoch seconds from which its report is too old)
--   acct:limit:{limit}@, acct:limit:{limit}@{machine}, acct:machines:{limit}   see includes/machines.lua
--   acct:machines:{limit}:others   set: machines that hold it by what the ledger does not have, as caps_at saw it
--   acct:ledger          hash: pk_proc -> record
--   acct:tomb:{bucket}   set of released pk_procs; a bucket is TOMB_WIDTH seconds of Redis TIME
--   acct:epoch           open|generation|run id, and |dual behind it when another program publishes plain decrements;
--                        while the store is filled: filling|token|run id
--   acct:audit           token|number of corrections of a running consistency check; acct:audit:log gets every change
--   acct:seq             moved by every mutation
--
-- An entry is  cores|gpus|show|alloc|folder|job|layer|dept|limit,limit  (an empty id: no such vertex; a limit L that
-- counts machines is  L,L@,L@machine);
-- a record is  1|state|booked at, seconds|changed seq|owner|entry  with state F (in flight) or C (confirmed). What does
-- not match RECORD is unreadable (as in opencue_sched/accounting/keys.py): it counts for nothing.
local SEQ, LEDGER, EPOCH, AUDIT = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local AUDIT_LOG = 'acct:audit:log'
local TOMB_WIDTH = 120
local RECORD = '^1|([FC])|(%d+)|(%d+)|([^|]*)|([^|]*|[^|]*|[^|]*|[^|]*|[^|]*|[^|]*|[^|]*|[^|]*|[^|]*)$'
local ENTRY = '^(%-?%d+)|(%-?%d+)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)|([^|]*)$'
local DUAL = string.sub(ARGV[1], -5) == '|dual'
local call, try = redis.call, redis.pcall

local gate = call('MGET', EPOCH, AUDIT)
local AUDITING = gate[2]
if gate[1] ~= ARGV[1] then
  return {0, 'not_ready', gate[1] or '', '0'}
end
local FENCE = KEYS[5]
--@include fence

-- Add to a counter. HINCRBY would end a script in the midst of its work where another program wrote what is no whole
-- number, or a key of another type: that counter becomes SPOILT, more than any cap, and nothing is booked there until
-- a recompute has corrected it.
local SPOILT = '1000000000000'
local function spoil(key, field)
  if call('TYPE', key).ok ~= 'hash' then call('UNLINK', key) end
  call('HSET', key, field, SPOILT)
end
local function add(key, field, more)
  local sum = try('HINCRBY', key, field, more)
  if type(sum) == 'table' then spoil(key, field) end
  return sum
end

-- Seconds of Redis TIME as text, and the tombstone bucket of now.
local function clock()
  local now = call('TIME')[1]
  return now, math.floor(now / TOMB_WIDTH)
end

local function tombstoned(id, bucket)
  return call('SISMEMBER', 'acct:tomb:' .. bucket, id) == 1
end

-- The keys of an entry's vertices that count cores and GPUs, in this order; false for each that there is not.
local function vertices(show, alloc, folder, job, layer, dept)
  return {
    alloc ~= '' and 'acct:sub:' .. show .. ':' .. alloc,
    folder ~= '' and 'acct:folder:' .. folder,
    job ~= '' and 'acct:job:' .. job,
    layer ~= '' and 'acct:layer:' .. layer,
    dept ~= '' and 'acct:point:' .. dept .. ':' .. show,
  }
end
