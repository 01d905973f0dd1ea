-- board_extend: prolong a claim, or write a result under it.
-- ARGV[2] uuid   ARGV[3] owner   ARGV[4] fence   ARGV[5] token
-- ARGV[6] life from now in ms, 0 never ends, '' leaves it   ARGV[7] result (JSON), or none
-- Returns 1; 0 when nobody has a claim; -1 when another owner or a later claim of the same one has.
-- Invariant: only the claim's owner under its fence and token does either; a claim that ran out is never revived.
--@include board
local refused = not_ours(ARGV[2], ARGV[3], ARGV[4], ARGV[5])
if refused then
  return (refused[2] == 'gone' or refused[2] == 'unclaimed') and 0 or -1
end
if ARGV[6] ~= '' then
  set_expiry(ARGV[2], tonumber(ARGV[6]))
end
if ARGV[7] then
  redis.call('HSET', PREFIX .. ARGV[2], 'result', ARGV[7], 'modified', format(now))
end
return 1
