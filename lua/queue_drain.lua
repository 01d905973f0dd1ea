-- queue_drain: move the messages of a dead instance's queue to its group's queue.
-- KEYS[1] presence key   KEYS[2] index of instances   KEYS[3..5] instance lists by priority   KEYS[6..8] group lists
-- ARGV[1] most messages a call   ARGV[2] age in ms after which an empty dead instance is forgotten
-- Returns how many messages were moved.
-- Invariants: each message is in exactly one list at any time; order within a priority is kept; what waited at the
-- instance goes to the consuming end of the group's list, because it has waited longest.
if redis.call('EXISTS', KEYS[1]) == 1 then
  return 0
end
local moved = 0
for i = 3, 5 do
  -- Consumers pop from the right. Taking the newest first (left) and putting each on the far right keeps the order,
  -- but only if the whole list is moved in one go: so a longer list than may be moved gives its oldest part.
  local part = math.min(redis.call('LLEN', KEYS[i]), ARGV[1] - moved)
  if part > 0 then
    local messages = redis.call('LRANGE', KEYS[i], -part, -1)
    redis.call('LTRIM', KEYS[i], 0, -part - 1)
    for first = 1, #messages, 1000 do
      redis.call('RPUSH', KEYS[i + 3], unpack(messages, first, math.min(first + 999, #messages)))
    end
    moved = moved + part
  end
end
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local seen = tonumber(redis.call('ZSCORE', KEYS[2], KEYS[1]) or '0')
if moved == 0 and now - seen >= tonumber(ARGV[2]) then
  redis.call('ZREM', KEYS[2], KEYS[1])
end
return moved
