-- lease_drop: give a lease up, and delete the keys that belong to it.
-- KEYS    1 the lease, others to delete with it
-- ARGV    1 token
-- Returns 1, or 0 when the lease is not the token's (any more).
-- Invariants: another holder's lease or check is not ended. A leader's lease holds its token and its fence, "token|fence".
local held = redis.call('GET', KEYS[1]) or ''
if held ~= ARGV[1] and string.match(held, '^(.*)|%d+$') ~= ARGV[1] then
  return 0
end
redis.call('UNLINK', unpack(KEYS))
return 1
