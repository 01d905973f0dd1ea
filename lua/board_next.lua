-- board_next: take the ready job of the highest priority, the oldest of these. O(log n).
-- ARGV[2] owner   ARGV[3] claim's life in ms, 0 never ends   ARGV[4] lowest and ARGV[5] highest priority rank wanted
-- ARGV[6] a token nobody else knows, by which this claim is told from every other
-- ARGV[7] key that remembers what a call with this token took
-- Returns {1, uuid, fence, wake, name, details} or {0}.
-- Invariants: as board_claim.
--@include board
local before = redis.call('GET', ARGV[7])
if before then
  local fence, wake, name, details = taken_before(before, ARGV[6])
  if fence then
    return {1, before, fence, wake, name, details}
  end
end
for _ = 1, PROMOTED_PER_CALL do
  local uuid = redis.call('ZRANGEBYSCORE', READY, format(tonumber(ARGV[4]) * 1e12),
    '(' .. format((tonumber(ARGV[5]) + 1) * 1e12), 'LIMIT', 0, 1)[1]
  if uuid and whole(uuid) then
    redis.call('SET', ARGV[7], uuid, 'PX', CALLS_KEPT_MS)
    return {1, uuid, take(uuid, ARGV[2], tonumber(ARGV[3]), ARGV[6])}
  elseif not uuid then
    break
  end
  forget(uuid)
end
return {0}
