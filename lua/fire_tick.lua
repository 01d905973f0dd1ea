-- fire_tick: whether the holder of the lease may fire now; the record of ticks in PostgreSQL then decides which.
-- KEYS[1] lease   KEYS[2] when anything was fired last (ms)   KEYS[3] quiet mark of a new holder
-- ARGV[1] token   ARGV[2] fence   ARGV[3] life in ms that the lease gets anew by firing; 0 leaves it as it is
-- Returns 'fire'; 'not_leader' the lease is gone or another's; 'quiet' a new leader must wait.
-- Invariant: asked again, because the answer was lost, it answers the same and does the same.
if redis.call('GET', KEYS[1]) ~= ARGV[1] .. '|' .. ARGV[2] then
  return 'not_leader'
end
if redis.call('EXISTS', KEYS[3]) == 1 then
  return 'quiet'
end
local t = redis.call('TIME')
redis.call('SET', KEYS[2], string.format('%.0f', tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)))
if tonumber(ARGV[3]) > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[3])
end
return 'fire'
