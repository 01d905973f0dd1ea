-- turn_take: begin a turn, unless it is somebody else's.
-- KEYS    1 the turn
-- ARGV    1 token   2 life in ms
-- Returns 1, also when it is this token's already, because the answer was lost and the call is made again; else 0.
-- Invariants: a turn ends by itself.
local token = redis.call('GET', KEYS[1])
if token and token ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
