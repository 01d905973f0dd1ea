-- queue_put: put a periodic message on a queue, once, in the place of the one before it that still waits.
-- KEYS 1 the list   2 hash of the message last put on each list for each series: tick, space, message
-- ARGV 1 message   2 its series   3 its tick
-- Returns 1; 0 when that of this tick was put there before, and the answer lost.
-- Invariant: a tick puts one message, however often a client that got no answer tries. Of each series a list holds the
-- message of the latest tick; one of an earlier tick that comes late takes no place.
local field = KEYS[1] .. ' ' .. ARGV[2]
local tick, message = string.match(redis.call('HGET', KEYS[2], field) or '', '^(%d+) (.*)$')
local last, this = tonumber(tick or '-1'), tonumber(ARGV[3])
if last == this then
  return 0
end
if last < this then
  if message then
    redis.call('LREM', KEYS[1], 0, message)
  end
  redis.call('HSET', KEYS[2], field, ARGV[3] .. ' ' .. ARGV[1])
end
redis.call('LPUSH', KEYS[1], ARGV[1])
return 1
