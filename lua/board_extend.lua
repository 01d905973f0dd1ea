-- board_extend: prolong a claim.
-- ARGV[2] uuid   ARGV[3] owner   ARGV[4] fence   ARGV[5] token   ARGV[6] life from now in ms, 0 never ends
-- Returns 1; 0 when nobody has a claim; -1 when another owner or a later claim of the same one has.
-- Invariant: only the claim's owner under its fence and token prolongs it; a claim that ran out is never revived.
--@include board
local now = now_ms()
promote(now)
local job = PREFIX .. ARGV[2]
local read = fields_now(ARGV[2], 'state', 'owner', 'fence', 'claim')
if read[1] ~= 'claimed' then
  return 0
elseif read[2] ~= ARGV[3] or not is_claim(read, ARGV[4], ARGV[5]) then
  return -1
end
local expires = tonumber(ARGV[6]) > 0 and format(now + tonumber(ARGV[6])) or '+inf'
redis.call('ZADD', CLAIMED, expires, ARGV[2])
redis.call('HSET', job, 'expires', expires)
return 1
