-- board_claim: take a ready job.
-- ARGV[2] uuid   ARGV[3] owner   ARGV[4] claim's life in ms, 0 never ends
-- Returns {1, fence, wake, name, details}; {0, 'gone'}; {0, 'held', owner}; {0, 'not_yet', ms to go}; {0, 'trashed'}.
-- Invariant: at most one live claim a job; every claim has a higher fence than all before.
--@include board
local now = now_ms()
promote(now)
local uuid, owner, life = ARGV[2], ARGV[3], tonumber(ARGV[4])
local job = PREFIX .. uuid
local state = redis.call('HGET', job, 'state')
if not state then
  return {0, 'gone'}
elseif state == 'claimed' then
  return {0, 'held', redis.call('HGET', job, 'owner')}
elseif state == 'delayed' then
  return {0, 'not_yet', tonumber(redis.call('ZSCORE', DELAYED, uuid)) - now}
elseif state == 'trash' then
  return {0, 'trashed'}
end
local fence = redis.call('HINCRBY', job, 'fence', 1)
local expires = life > 0 and format(now + life) or '+inf'
redis.call('ZREM', READY, uuid)
redis.call('ZADD', CLAIMED, expires, uuid)
redis.call('HSET', job, 'state', 'claimed', 'owner', owner, 'expires', expires, 'modified', format(now))
local read = redis.call('HMGET', job, 'wake', 'name', 'details')
emit('CLAIMED', uuid, read[2])
return {1, fence, tonumber(read[1]), read[2], read[3]}
