-- board_note: write a result under a claim.   ARGV[2] uuid   ARGV[3] owner   ARGV[4] fence   ARGV[5] token   ARGV[6] result (JSON)
-- Returns 1; 0 when nobody has a claim; -1 when another owner or a later claim of the same one has.
-- Invariant: nothing is written by anybody but the claim's owner under its fence and token.
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
redis.call('HSET', job, 'result', ARGV[6], 'modified', format(now))
return 1
