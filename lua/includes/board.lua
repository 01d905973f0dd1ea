-- Shared by the board scripts. KEYS of all of them: 1 ready, 2 delayed, 3 claimed, 4 names, 5 seq, 6 events, 7 trash,
-- 8 listed, 9 awaited. ARGV[1] is the prefix of the jobs' hashes (same hash tag as the keys).
-- KEYS[10] and the last of ARGV of a periodic task are as includes/fence.lua says.
--
-- Keyspace: a job is one hash {prefix}{uuid} with the fields
--   name, key (idempotency key or ''), details (payload), prio (rank 0..4), created, modified (ms), seq, state,
--   owner, fence, claim (token that the present or last claimant made up), expires (ms, +inf never, 0 none),
--   failures (in a row), failing (ms of the first of them), reason (of the last, one line), error (its text),
--   wake (counts wake-ups), sent (ms a message was last sent), ticket (number of the last message sent),
--   done (tickets up to this one were answered by a claim), tries (messages since then that no claim answered),
--   rest (ms before which nothing wakes the job)
-- and a member of exactly one sorted set: ready (score: priority, then age), delayed (score: not before, ms), claimed
-- (score: expiry, ms; +inf never) or trash (score: trashed at, ms). listed holds all but the trash, scored as ready is.
-- names maps an idempotency key to its uuid. awaited has every job for which a message is to be sent (score: when, ms): when
-- its sleep ends, its claim ran out, or no claim answered the last message; board_due removes those that need none any more.
local READY, DELAYED, CLAIMED, NAMES, SEQ, EVENTS, TRASH, LISTED, AWAITED =
  KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6], KEYS[7], KEYS[8], KEYS[9]
local PREFIX = ARGV[1]
local PROMOTED_PER_CALL = 100
local EVENTS_KEPT = '10000'
local CALLS_KEPT_MS = 60000
local TRASH_KEPT_MS = 7 * 86400 * 1000

local FENCE = KEYS[10]
--@include fence

local function format(number)
  return string.format('%.0f', number)
end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)

-- Calls that change what they look at remember their answer for a while, under a key that the caller made up for this
-- call: made again because the answer was lost, it gets the same one. '' or nil remembers nothing.
local function remember(key, answer)
  if key and key ~= '' then
    redis.call('SET', key, cmsgpack.pack(answer), 'PX', CALLS_KEPT_MS)
  end
  return answer
end

-- What this very call answered before; nil when it was not made before.
local function answered_before(key)
  local answer = key and key ~= '' and redis.call('GET', key)
  return answer and cmsgpack.unpack(answer) or nil
end

local function emit(kind, uuid, name)
  redis.call('XADD', EVENTS, 'MAXLEN', '~', EVENTS_KEPT, '*', 'kind', kind, 'job', uuid, 'name', name)
end

local function rank(prio, seq)
  return tonumber(prio) * 1e12 + tonumber(seq)
end

local function remove_from(indexes, ...)
  for _, index in ipairs(indexes) do
    redis.call('ZREM', index, ...)
  end
end

-- The job leaves its place for another one, where nobody has it. What was sent for it is answered or void, so its next
-- message is no repetition.
local function move(uuid, state, place, score)
  remove_from({READY, DELAYED, CLAIMED, TRASH}, uuid)
  redis.call('ZADD', place, format(score), uuid)
  redis.call('HSET', PREFIX .. uuid, 'state', state, 'owner', '', 'expires', 0, 'sent', 0, 'tries', 0)
end

local function make_ready(uuid)
  local job = redis.call('HMGET', PREFIX .. uuid, 'prio', 'seq', 'name')
  move(uuid, 'ready', READY, rank(job[1], job[2]))
  emit('READY', uuid, job[3])
end

-- A message for the job is due at this moment, and no caller sends one now.
local function set_due(uuid, at)
  redis.call('ZADD', AWAITED, format(at), uuid)
end

-- The number of a message for the job that is about to be sent, perhaps after an unanswered one. A claim answers all
-- numbers up to the present one. Unless one does, the next message is due after `resend` ms, after an unanswered one twice as long, and so on
-- up to 16 times.
local function next_ticket(uuid, in_vain, resend)
  local job = PREFIX .. uuid
  local tries = in_vain and redis.call('HINCRBY', job, 'tries', 1) or 0
  redis.call('HSET', job, 'sent', format(now))
  set_due(uuid, now + resend * 2 ^ math.min(4, tries))
  return redis.call('HINCRBY', job, 'ticket', 1)
end

-- Fields of a job; none when its key was made one of another type.
local function fields_now(uuid, ...)
  local read = redis.pcall('HMGET', PREFIX .. uuid, ...)
  return read.err and {} or read
end

local EACH_HAS = {'state', 'name', 'key', 'details', 'owner', 'modified', 'prio', 'seq', 'fence', 'expires', 'wake', 'sent',
  'failures', 'ticket', 'done', 'tries', 'rest'}
local TEXTS = 6

-- What every job has, the first of them as text, the others as numbers; nil for one that is gone, of which a part was
-- lost, or whose name another job has got since.
local function whole(uuid)
  local read, job = fields_now(uuid, unpack(EACH_HAS)), {}
  for i, field in ipairs(EACH_HAS) do
    job[field] = read[i] and (i <= TEXTS and read[i] or tonumber(read[i]))
    if not job[field] then
      return nil
    end
  end
  local named = job.key ~= '' and redis.call('HGET', NAMES, job.key)
  return (not named or named == uuid) and job or nil
end

-- The job goes for good, or what is left of one that is not whole: a caller that enqueues the job then posts it anew.
local function forget(uuid)
  local key = fields_now(uuid, 'key')[1]
  if key and key ~= '' and redis.call('HGET', NAMES, key) == uuid then
    redis.call('HDEL', NAMES, key)
  end
  redis.call('DEL', PREFIX .. uuid)
  remove_from({READY, DELAYED, CLAIMED, TRASH, LISTED, AWAITED}, uuid)
end

-- What a job's hash has from the beginning.
local function fields_of(name, key, details, prio, seq)
  return {'name', name, 'key', key, 'details', details, 'prio', prio, 'created', format(now), 'modified', '', 'seq', seq,
    'owner', '', 'fence', 0, 'expires', 0, 'wake', 0, 'sent', 0, 'failures', 0, 'ticket', 0, 'done', 0, 'tries', 0,
    'rest', 0, 'state', 'ready'}
end

local function create(uuid, name, key, details, prio)
  local seq = redis.call('INCR', SEQ)
  redis.call('HSET', PREFIX .. uuid, unpack(fields_of(name, key, details, prio, seq)))
  redis.call('ZADD', LISTED, rank(prio, seq), uuid)
  if key ~= '' then
    redis.call('HSET', NAMES, key, uuid)
  end
  emit('POSTED', uuid, name)
  return seq
end

local function make_trashed(uuid, name, error, since)
  since = tonumber(since) or now
  move(uuid, 'trash', TRASH, since)
  remove_from({LISTED, AWAITED}, uuid)
  redis.call('HSET', PREFIX .. uuid, 'error', error, 'modified', format(since))
  emit('TRASHED', uuid, name)
end

-- What was put aside too long ago goes for good. Bounded; what is left waits for the next call.
local function empty_trash()
  for _, uuid in ipairs(redis.call('ZRANGEBYSCORE', TRASH, '-inf', now - TRASH_KEPT_MS, 'LIMIT', 0, 10)) do
    forget(uuid)
  end
end

-- The claim ends so many ms from now; 0: never.
local function set_expiry(uuid, life)
  local expires = life > 0 and format(now + life) or '+inf'
  redis.call('ZADD', CLAIMED, expires, uuid)
  redis.call('HSET', PREFIX .. uuid, 'expires', expires)
end

-- Take a ready job: {1, uuid, fence, wake count, name, details}.
local function take(uuid, owner, life, token)
  local job = PREFIX .. uuid
  local fence = redis.call('HINCRBY', job, 'fence', 1)
  remove_from({READY, AWAITED}, uuid)
  set_expiry(uuid, life)
  local read = redis.call('HMGET', job, 'wake', 'name', 'details', 'ticket')
  redis.call('HSET', job, 'state', 'claimed', 'owner', owner, 'claim', token, 'modified', format(now),
    'done', read[4], 'tries', 0)
  emit('CLAIMED', uuid, read[2])
  return {1, uuid, fence, tonumber(read[1]), read[2], read[3]}
end

-- Before anything else: jobs whose not-before has come, and claims that ran out, become ready. Bounded; what is left waits
-- for the next call.
for _, index in ipairs({DELAYED, CLAIMED}) do
  for _, uuid in ipairs(redis.call('ZRANGEBYSCORE', index, '-inf', now, 'LIMIT', 0, PROMOTED_PER_CALL)) do
    local job = whole(uuid)
    if not job then
      forget(uuid)
    elseif index == DELAYED then
      make_ready(uuid)
    else
      emit('EXPIRED', uuid, job.name)
      make_ready(uuid)
      -- Unanswered, as far as is known: the next message is due at once, and must not go to the same owner.
      redis.call('HSET', PREFIX .. uuid, 'sent', 1)
      set_due(uuid, now)
    end
  end
end
