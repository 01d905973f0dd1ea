-- epoch_fill: close the store and begin to fill it, or go on where another filler left off.
-- KEYS    1 acct:epoch, 2 acct:bootstrap, 3 acct:waited
-- ARGV    1 the filler's lease token, 2 the filling epoch, 3 run id of this server, 4 '1' to close an open store too
-- Returns {1, ms that fillers before this one have waited since the store was closed}, or {0, 0} when the lease is
--         somebody else's or the store is open.
-- Invariants: an open store of this server is closed only on purpose; who filled before is fenced off by the new value;
--         a wait counts only if the store is as its filler left it: closed, of this server, under the epoch it noted.
local read = redis.call('MGET', KEYS[1], KEYS[2])
if read[2] ~= ARGV[1] then
  return {0, 0}
end
local stored = read[1] or ''
local state, run_id = string.match(stored, '^(%a+)|[^|]*|([^|]*)')
if state == 'open' and run_id == ARGV[3] and ARGV[4] ~= '1' then
  return {0, 0}
end
local waited, noted = string.match(redis.call('MGET', KEYS[3])[1] or '', '^(%d+)|(.*)$')
if state ~= 'filling' or run_id ~= ARGV[3] or noted ~= stored then
  waited = '0'
end
redis.call('SET', KEYS[1], ARGV[2])
redis.call('SET', KEYS[3], waited .. '|' .. ARGV[2])
return {1, tonumber(waited)}
