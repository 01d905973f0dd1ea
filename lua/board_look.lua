-- board_look: the counts of a board at this moment, and one of its jobs.   ARGV[2] uuid, or ''
-- Returns {ready, delayed, claimed, trash, ms until the next job becomes ready by itself or -1, the job's fields and values
-- (none if it is gone), ms until its claim ends (-1 never, -2 no claim)}.
--@include board
local function first(index)
  return tonumber(redis.call('ZRANGEBYSCORE', index, '-inf', '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2] or 'inf') or math.huge
end
local function left(at)
  return at < math.huge and math.max(0, at - now) or -1
end
local fields = whole(ARGV[2]) and redis.call('HGETALL', PREFIX .. ARGV[2]) or {}
local expires = redis.call('ZSCORE', CLAIMED, ARGV[2])
return {redis.call('ZCARD', READY), redis.call('ZCARD', DELAYED), redis.call('ZCARD', CLAIMED),
  redis.call('ZCARD', TRASH), left(math.min(first(DELAYED), first(CLAIMED))), fields,
  expires and left(tonumber(expires) or math.huge) or -2}
