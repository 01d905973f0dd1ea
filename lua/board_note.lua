-- board_note: write a result under a claim.   ARGV[2] uuid   ARGV[3] owner   ARGV[4] fence   ARGV[5] result (JSON)
-- Returns 1; 0 when nobody has a claim; -1 when another owner or a later claim of the same one has.
-- Invariant: nothing is written by anybody but the claim's owner under its fence.
--@include board
local now = now_ms()
promote(now)
local job = PREFIX .. ARGV[2]
local read = redis.call('HMGET', job, 'state', 'owner', 'fence')
if read[1] ~= 'claimed' then
  return 0
elseif read[2] ~= ARGV[3] or read[3] ~= ARGV[4] then
  return -1
end
redis.call('HSET', job, 'result', ARGV[5], 'modified', format(now))
return 1
