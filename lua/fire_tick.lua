-- fire_tick: decide, in one step, whether this process may fire this nominal tick of a periodic task.
-- KEYS[1] lease   KEYS[2] fired mark of (task, tick)   KEYS[3] hash of each task's last tick
-- KEYS[4] when anything was fired last (ms)   KEYS[5] quiet mark of a new holder
-- ARGV[1] token   ARGV[2] fence   ARGV[3] mark's life in ms   ARGV[4] task   ARGV[5] tick
-- ARGV[6] life in ms that the lease gets anew by firing; 0 leaves it as it is
-- ARGV[7] nonce of this question: asked again, because the answer was lost, it is answered as the first time
-- Returns {1} fire it; {0, 'not_leader'} the lease is gone or somebody else's; {0, 'quiet'} a new leader must wait;
-- {0, 'fired'} somebody fired it before.
-- Invariant: a mark is set at most once per (task, tick), by one nonce, and only by the present leader.
if redis.call('GET', KEYS[1]) ~= ARGV[1] .. '|' .. ARGV[2] then
  return {0, 'not_leader'}
end
local mark = redis.call('GET', KEYS[2])
if mark then
  return mark == ARGV[7] and {1} or {0, 'fired'}
end
if redis.call('EXISTS', KEYS[5]) == 1 then
  return {0, 'quiet'}
end
redis.call('SET', KEYS[2], ARGV[7], 'PX', ARGV[3])
local t = redis.call('TIME')
redis.call('SET', KEYS[4], string.format('%.0f', tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000)))
if tonumber(ARGV[6]) > 0 then
  redis.call('PEXPIRE', KEYS[1], ARGV[6])
end
local last = tonumber(string.match(redis.call('HGET', KEYS[3], ARGV[4]) or '', '^%-?%d+$') or '') or -1
if tonumber(ARGV[5]) > last or last >= 2 ^ 63 then
  redis.call('HSET', KEYS[3], ARGV[4], ARGV[5])
end
return {1}
