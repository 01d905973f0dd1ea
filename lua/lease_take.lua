-- lease_take: take a lease, or renew one's own.
-- KEYS    1 the lease, others that belong to it
-- ARGV    1 token, 2 life in ms
-- Returns 1, also when it is this token's already: renewed, or taken by a call whose answer was lost; else 0.
-- Invariants: a lease ends by itself; the life is replaced, not added to; another holder's lease is not prolonged; what
--         belongs to it is empty when it is taken.
local token = redis.call('MGET', KEYS[1])[1]
if token and token ~= ARGV[1] then
  return 0
end
if not token and KEYS[2] then
  redis.call('UNLINK', unpack(KEYS, 2))
end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
