-- board_next: take the ready job of the highest priority, the oldest of these. O(log n).
-- ARGV[2] owner   ARGV[3] claim's life in ms, 0 never ends   ARGV[4] lowest and ARGV[5] highest priority rank wanted
-- ARGV[6] a token nobody else knows, by which this claim is told from every other
-- Returns {1, uuid, fence, wake, name, details} or {0}.
-- Invariant: as board_claim.
--@include board
local now = now_ms()
promote(now)
local found = redis.call('ZRANGEBYSCORE', READY, format(tonumber(ARGV[4]) * 1e12),
  '(' .. format((tonumber(ARGV[5]) + 1) * 1e12), 'LIMIT', 0, 1)
if not found[1] then
  return {0}
end
return {1, found[1], take(found[1], ARGV[2], tonumber(ARGV[3]), now, ARGV[6])}
