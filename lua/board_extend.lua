-- board_extend: prolong a claim.   ARGV[2] uuid   ARGV[3] owner   ARGV[4] fence   ARGV[5] life from now in ms
-- Returns 1, or 0 when the claim is no longer this owner's under this fence. Never revives a claim that ran out.
--@include board
local now = now_ms()
promote(now)
local job = PREFIX .. ARGV[2]
local read = redis.call('HMGET', job, 'state', 'owner', 'fence')
if read[1] ~= 'claimed' or read[2] ~= ARGV[3] or read[3] ~= ARGV[4] then
  return 0
end
local expires = format(now + tonumber(ARGV[5]))
redis.call('ZADD', CLAIMED, expires, ARGV[2])
redis.call('HSET', job, 'expires', expires)
return 1
