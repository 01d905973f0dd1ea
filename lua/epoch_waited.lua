-- epoch_waited: note for a successor how long the store is closed by now.
-- KEYS    1 acct:epoch, 2 acct:waited
-- ARGV    1 the filling epoch, 2 ms since the store was closed, by the boot clocks of its fillers: never more than it was
-- Returns 1, or 0 when another process fills the store, or it was lost, since.
-- Invariants: only the filler of the last epoch_fill notes anything.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('SET', KEYS[2], ARGV[2] .. '|' .. ARGV[1])
return 1
