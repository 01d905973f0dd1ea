-- token_drop: delete keys that belong together, if the first still holds our token.
-- KEYS    1 the key with the token, others to delete with it
-- ARGV    1 token
-- Returns 1, or 0 when the token is not ours (any more).
-- Invariants: another holder's lease or check is not ended.
if redis.call('GET', KEYS[1]) ~= ARGV[1] then
  return 0
end
redis.call('UNLINK', unpack(KEYS))
return 1
