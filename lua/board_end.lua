-- board_end: end a claim.
-- ARGV[2] uuid   ARGV[3] owner   ARGV[4] fence   ARGV[5] how   ARGV[6] delay in ms   ARGV[7] wake seen at the claim
-- ARGV[8] failures allowed in a row   ARGV[9] error text
-- how: 'again'   ready at once, a message is to be sent
--      'abandon' ready at once, no message (somebody else may take it)
--      'sleep'   not before now + delay; ready at once instead if it was woken during the claim
--      'fail'    like sleep, counting the failure; after the allowed number of them, trash with the error text
--      'consume' done: the job is gone
--      'trash'   kept aside with the error text
-- Returns {1, send (1|0), new state} or {0, 'gone'|'lost'}.
-- Invariant: only the claim's owner under its fence ends it; the job is in exactly one place afterwards.
--@include board
local now = now_ms()
promote(now)
local uuid, how = ARGV[2], ARGV[5]
local job = PREFIX .. uuid
local read = redis.call('HMGET', job, 'state', 'owner', 'fence', 'wake', 'failures', 'name')
if not read[1] then
  return {0, 'gone'}
end
if read[1] ~= 'claimed' or read[2] ~= ARGV[3] or read[3] ~= ARGV[4] then
  return {0, 'lost'}
end
local name = read[6]
redis.call('ZREM', CLAIMED, uuid)
redis.call('HSET', job, 'modified', format(now))

if how == 'fail' then
  local failures = redis.call('HINCRBY', job, 'failures', 1)
  redis.call('HSET', job, 'error', ARGV[9])
  how = failures >= tonumber(ARGV[8]) and 'trash' or 'sleep'
elseif how ~= 'abandon' then
  redis.call('HSET', job, 'failures', 0)
end

if how == 'consume' then
  redis.call('DEL', job)
  redis.call('HDEL', NAMES, name)
  emit('REMOVED', uuid, name)
  return {1, 0, 'complete'}
elseif how == 'trash' then
  redis.call('HSET', job, 'state', 'trash', 'owner', '', 'expires', 0, 'error', ARGV[9])
  redis.call('ZADD', TRASH, format(now), uuid)
  emit('TRASHED', uuid, name)
  return {1, 0, 'trash'}
elseif how == 'sleep' and read[4] == ARGV[7] then
  local due = format(now + tonumber(ARGV[6]))
  redis.call('HSET', job, 'state', 'delayed', 'owner', '', 'expires', 0)
  redis.call('ZADD', DELAYED, due, uuid)
  return {1, 0, 'delayed'}
end
make_ready(uuid)
local send = how == 'abandon' and 0 or 1
redis.call('HSET', job, 'sent', send == 1 and format(now) or 0)
return {1, send, 'ready'}
