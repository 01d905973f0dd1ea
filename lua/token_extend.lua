-- token_extend: keep a lease a while longer.
-- KEYS    1 the key with the token
-- ARGV    1 token, 2 life in ms
-- Returns 1, or 0 when the token is not ours (any more).
-- Invariants: nobody else's lease is extended; the life is replaced, not added to.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
