-- epoch_fill: close the store and begin to fill it.
-- KEYS    1 acct:epoch, 2 acct:bootstrap
-- ARGV    1 the filler's lease token, 2 the filling epoch, 3 run id of this server, 4 '1' to close an open store too
-- Returns 1, or 0 when the lease is somebody else's or the store is open.
-- Invariants: an open store of this server is closed only on purpose; who filled before is fenced off by the new value.
if redis.call('GET', KEYS[2]) ~= ARGV[1] then
  return 0
end
local stored = redis.call('GET', KEYS[1])
if stored and ARGV[4] ~= '1' then
  local state, run_id = string.match(stored, '^(%a+)|[^|]*|([^|]*)')
  if state == 'open' and run_id == ARGV[3] then
    return 0
  end
end
redis.call('SET', KEYS[1], ARGV[2])
return 1
