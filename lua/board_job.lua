-- board_job: one job as it is at this moment.   ARGV[2] uuid
-- Returns its fields and values (none if it is gone), then ms until its claim ends (-1 never, -2 no claim).
--@include board
local now = now_ms()
promote(now)
local fields = whole(ARGV[2]) and redis.call('HGETALL', PREFIX .. ARGV[2]) or {}
local left = -2
local expires = redis.call('ZSCORE', CLAIMED, ARGV[2])
if expires then
  left = (expires == 'inf' or expires == '+inf') and -1 or tonumber(expires) - now
end
return {fields, left}
