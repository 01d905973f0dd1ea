-- fire_tick: decide, in one step, whether this process may fire this nominal tick of a periodic task.
-- KEYS[1] lease   KEYS[2] fired mark of (task, tick)   KEYS[3] hash of each task's last tick
-- ARGV[1] token   ARGV[2] fence   ARGV[3] mark's life in ms   ARGV[4] task   ARGV[5] tick
-- Returns {1} fire it; {0, 'not_leader'} the lease is gone or somebody else's; {0, 'fired'} somebody fired it before.
-- Invariant: a mark is set at most once per (task, tick), and only by the present leader.
if redis.call('GET', KEYS[1]) ~= ARGV[1] .. '|' .. ARGV[2] then
  return {0, 'not_leader'}
end
if not redis.call('SET', KEYS[2], ARGV[2], 'NX', 'PX', ARGV[3]) then
  return {0, 'fired'}
end
local last = tonumber(redis.call('HGET', KEYS[3], ARGV[4]) or '-1')
if tonumber(ARGV[5]) > last then
  redis.call('HSET', KEYS[3], ARGV[4], ARGV[5])
end
return {1}
