-- board_look: the counts of a board, after promotion.
-- Returns {ready, delayed, claimed, trash, ms until the next job becomes ready by itself or -1}.
--@include board
local now = now_ms()
promote(now)
local due = redis.call('ZRANGE', DELAYED, 0, 0, 'WITHSCORES')[2]
local expiry = redis.call('ZRANGE', CLAIMED, 0, 0, 'WITHSCORES')[2]
local next_at = math.min(tonumber(due or 'inf') or math.huge, tonumber(expiry or 'inf') or math.huge)
local left = next_at < math.huge and math.max(0, next_at - now) or -1
return {redis.call('ZCARD', READY), redis.call('ZCARD', DELAYED), redis.call('ZCARD', CLAIMED),
  redis.call('ZCARD', TRASH), left}
