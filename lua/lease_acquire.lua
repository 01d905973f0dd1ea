-- lease_acquire: take or renew an expiring, fenced lease.
-- KEYS[1] lease (string "token|fence", always with a TTL)   KEYS[2] fence (integer, only ever grows)
-- KEYS[3] when anything was fired last (ms)   KEYS[4] quiet mark: there while a new holder must not fire
-- ARGV[1] token (unique per process)   ARGV[2] ttl in ms
-- ARGV[3] 'renew' to prolong the lease of the fence ARGV[4] and take nothing;
-- 'take' to get a new one, of a fence above ARGV[4], the highest known elsewhere
-- ARGV[5] quiet time in ms: a new holder fires nothing until that long after the last fire; 0 for none
-- ARGV[6] the longest life in ms that any lease has: more than that is left of one only when the clock was put back
-- Returns {1, fence, ttl_ms, ms since the last fire or -1, its moment or -1} to the holder; {0, holder's fence, remaining
-- ms, ...} to others.
-- Invariants: one holder at a time; a new holder's fence is higher than every earlier one, also after the store was
-- emptied or an older state of it came back; a lease below the highest fence is nobody's, whoever's it was; only the
-- holder's own token prolongs it; where nobody knows when it was last fired, a holder that had predecessors keeps quiet for
-- the whole time.
local t = redis.call('TIME')
local now = tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)
local fired = tonumber(redis.call('GET', KEYS[3]) or '')
local fired_ago = fired and math.max(0, now - fired) or -1
fired = fired or -1
local held = redis.call('GET', KEYS[1]) or ''
local token, number = string.match(held, '^(.*)|(%d+)$')
local fence = tonumber(number or '0')
local counted = tonumber(redis.call('GET', KEYS[2]) or '0')
local known = tonumber(ARGV[4])
if ARGV[3] == 'renew' then
  if token ~= ARGV[1] or fence ~= known or counted > known then
    return {0, fence, 0, fired_ago, fired}
  end
  redis.call('SET', KEYS[2], fence)
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return {1, fence, tonumber(ARGV[2]), fired_ago, fired}
end
local highest = math.max(known, counted)
local valid = token and fence >= highest
if valid and token ~= ARGV[1] then
  local left = redis.call('PTTL', KEYS[1])
  if left > tonumber(ARGV[6]) then
    left = tonumber(ARGV[6])
    redis.call('PEXPIRE', KEYS[1], left)
  end
  return {0, fence, left, fired_ago, fired}
end
fence = math.max(highest, fence) + 1
redis.call('SET', KEYS[2], fence)
redis.call('SET', KEYS[1], ARGV[1] .. '|' .. fence, 'PX', ARGV[2])
local quiet = tonumber(ARGV[5])
if quiet > 0 and not valid then
  local left = fence > 1 and quiet or 0
  if fired >= 0 and counted >= known then
    left = math.min(quiet, fired + quiet - now)
  end
  if left > 0 then
    redis.call('SET', KEYS[4], fence, 'PX', string.format('%.0f', left))
  end
end
return {1, fence, tonumber(ARGV[2]), fired_ago, fired}
