-- board_next: take the ready job of the highest priority, the oldest of these. O(log n).
-- ARGV[2] owner   ARGV[3] claim's life in ms, 0 never ends   ARGV[4] lowest priority rank wanted
-- ARGV[5] a token nobody else knows, by which this claim is told from every other
-- ARGV[6] key that remembers what a call with this token took
-- Returns {1, uuid, fence, wake, name, details} or {0}.
-- Invariants: as board_claim.
--@include board
local before = redis.call('GET', ARGV[6])
local mine = before and taken_before(before, ARGV[5])
if mine then
  return mine
end
local below = '(' .. format(rank(tonumber(ARGV[4]) + 1, 0))
for _ = 1, PROMOTED_PER_CALL do
  local uuid = redis.call('ZRANGEBYSCORE', READY, '-inf', below, 'LIMIT', 0, 1)[1]
  if not uuid then
    break
  elseif whole(uuid) then
    redis.call('SET', ARGV[6], uuid, 'PX', CALLS_KEPT_MS)
    return take(uuid, ARGV[2], tonumber(ARGV[3]), ARGV[5])
  end
  forget(uuid)
end
return {0}
