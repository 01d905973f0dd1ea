-- epoch_open: the store is filled; open it.
-- KEYS    1 acct:epoch, 2 acct:seq, 3 acct:waited
-- ARGV    1 the filling epoch, 2 the open epoch
-- Returns 1, or 0 when another process has begun to fill the store since.
-- Invariants: only the filler of the last epoch_fill opens the store; what was waited before it was open never counts.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('INCR', KEYS[2])
redis.call('SET', KEYS[1], ARGV[2])
redis.call('UNLINK', KEYS[3])
return 1
