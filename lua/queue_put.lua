-- queue_put: put a message on a queue, once.
-- KEYS 1 the list   2 mark of this sending   ARGV 1 message   2 life of the mark in ms
-- Returns 1; 0 when it was put there before, and the answer lost.
-- Invariant: one sending puts one message, however often a client that got no answer tries.
if not redis.call('SET', KEYS[2], 1, 'NX', 'PX', ARGV[2]) then
  return 0
end
redis.call('LPUSH', KEYS[1], ARGV[1])
return 1
