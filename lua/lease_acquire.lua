-- lease_acquire: take or renew an expiring, fenced lease.
-- KEYS[1] lease (string "token|fence", always with a TTL)   KEYS[2] fence (integer, only ever grows)
-- ARGV[1] token (unique per process)   ARGV[2] ttl in ms   ARGV[3] fence floor (the highest fence known elsewhere)
-- Returns {1, fence, ttl_ms} to the holder; {0, holder's fence, remaining ms} to anybody else.
-- Invariants: one holder at a time; a new holder's fence is higher than every earlier one, also after the store was
-- emptied (the floor); only the holder's own token renews.
local held = redis.call('GET', KEYS[1])
if held then
  local token, fence = string.match(held, '^(.*)|(%d+)$')
  if token == ARGV[1] then
    redis.call('PEXPIRE', KEYS[1], ARGV[2])
    return {1, tonumber(fence), tonumber(ARGV[2])}
  end
  return {0, tonumber(fence), redis.call('PTTL', KEYS[1])}
end
local fence = redis.call('INCR', KEYS[2])
local floor = tonumber(ARGV[3])
if fence <= floor then
  fence = floor + 1
  redis.call('SET', KEYS[2], fence)
end
redis.call('SET', KEYS[1], ARGV[1] .. '|' .. fence, 'PX', ARGV[2])
return {1, fence, tonumber(ARGV[2])}
