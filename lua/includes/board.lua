-- Shared by the board scripts. KEYS of all of them: 1 ready, 2 delayed, 3 claimed, 4 names, 5 seq, 6 events, 7 trash.
-- ARGV[1] is the prefix of the jobs' hashes (same hash tag as the keys).
--
-- Keyspace: a job is one hash {prefix}{uuid} (name, details, prio, created, modified, seq, owner, fence, expires, wake,
-- sent, failures, state) and a member of exactly one sorted set: ready (score: priority, then age), delayed (score: not
-- before, ms), claimed (score: expiry, ms; +inf never) or trash (score: trashed at, ms). names maps a name to its uuid.
local READY, DELAYED, CLAIMED, NAMES, SEQ, EVENTS, TRASH = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7]
local PREFIX = ARGV[1]
local PROMOTED_PER_CALL = 100
local EVENTS_KEPT = 10000

local function now_ms()
  local t = redis.call('TIME')
  return tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
end

local function emit(kind, uuid, name)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', EVENTS_KEPT, '*', 'kind', kind, 'job', uuid, 'name', name)
end

local function make_ready(uuid)
  local job = redis.call('HMGET', PREFIX .. uuid, 'prio', 'seq')
  redis.call('HSET', PREFIX .. uuid, 'state', 'ready', 'owner', '', 'expires', 0)
  redis.call('ZADD', READY, tonumber(job[1]) * 1e12 + tonumber(job[2]), uuid)
end

-- Jobs whose not-before has come, and claims that ran out, become ready. Bounded; what is left waits for the next call.
local function promote(now)
  for _, uuid in ipairs(redis.call('ZRANGEBYSCORE', DELAYED, '-inf', now, 'LIMIT', 0, PROMOTED_PER_CALL)) do
    redis.call('ZREM', DELAYED, uuid)
    make_ready(uuid)
  end
  for _, uuid in ipairs(redis.call('ZRANGEBYSCORE', CLAIMED, '-inf', now, 'LIMIT', 0, PROMOTED_PER_CALL)) do
    redis.call('ZREM', CLAIMED, uuid)
    redis.call('HSET', PREFIX .. uuid, 'sent', 0)
    make_ready(uuid)
    emit('EXPIRED', uuid, redis.call('HGET', PREFIX .. uuid, 'name'))
  end
end

local function format(number)
  return string.format('%.0f', number)
end
