-- queue_put: put a message on a queue, once; a periodic message takes the place of the one before it.
-- KEYS 1 the list   2 mark of this sending   3 hash of the periodic message last put on each list: tick, space, message
-- ARGV 1 message   2 life of the mark in ms   3 series of a periodic message, or empty   4 its tick
-- Returns 1; 0 when it was put there before, and the answer lost.
-- Invariant: one sending puts one message, however often a client that got no answer tries. Of each series with a name a
-- list holds the message of the latest tick; one of an earlier tick that comes late takes no place.
if not redis.call('SET', KEYS[2], 1, 'NX', 'PX', ARGV[2]) then
  return 0
end
if ARGV[3] ~= '' then
  local field = KEYS[1] .. ' ' .. ARGV[3]
  local last = redis.call('HGET', KEYS[3], field)
  local tick, message = string.match(last or '', '^(%d+) (.*)$')
  if not tick or tonumber(tick) <= tonumber(ARGV[4]) then
    if message then
      redis.call('LREM', KEYS[1], 0, message)
    end
    redis.call('HSET', KEYS[3], field, ARGV[4] .. ' ' .. ARGV[1])
  end
end
redis.call('LPUSH', KEYS[1], ARGV[1])
return 1
