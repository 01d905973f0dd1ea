-- lease_acquire: take or renew an expiring, fenced lease.
-- KEYS[1] lease (string "token|fence", always with a TTL)   KEYS[2] fence (integer, only ever grows)
-- ARGV[1] token (unique per process)   ARGV[2] ttl in ms
-- ARGV[3] 'renew': prolong the lease of fence ARGV[4] only; 'take': a new one, above fence ARGV[4], the highest known
-- ARGV[5] the longest life in ms that any lease has: more than that is left of one only when the clock was put back
-- Returns the holder's fence to the holder, 0 to others.
-- Invariants: one holder at a time; a new holder's fence is higher than every earlier one, also after the store was
-- emptied or an older state of it came back; a lease below the highest fence is nobody's; only the
-- holder's own token prolongs it; a renewal that is made again because its answer was lost answers the same.
local token, number = string.match(redis.call('GET', KEYS[1]) or '', '^(.*)|(%d+)$')
local fence = tonumber(number or '0')
local counted = tonumber(redis.call('GET', KEYS[2]) or '0')
local known = tonumber(ARGV[4])
if ARGV[3] == 'renew' then
  if token ~= ARGV[1] or fence ~= known or counted > known then
    return 0
  end
  redis.call('SET', KEYS[2], fence)
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return fence
end
local highest = math.max(known, counted)
if token and token ~= ARGV[1] and fence >= highest then
  if redis.call('PTTL', KEYS[1]) > tonumber(ARGV[5]) then
    redis.call('PEXPIRE', KEYS[1], ARGV[5])
  end
  return 0
end
fence = math.max(highest, fence) + 1
redis.call('SET', KEYS[2], fence)
redis.call('SET', KEYS[1], ARGV[1] .. '|' .. fence, 'PX', ARGV[2])
return fence
