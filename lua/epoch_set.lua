-- epoch_set: close the store, note how long it is closed, or open it: replace the epoch, if it is the one that was seen.
-- KEYS    1 acct:epoch, 2 acct:seq
-- ARGV    1 the epoch as the caller saw it ('' for none, or one of another type), 2 the new one
-- Returns 1, also when it is there already, by a call whose answer was lost; 0 when another process has changed it since.
-- Invariants: of all callers that have seen an epoch one replaces it; the process that filled the store before is fenced off.
--         A number that cannot be increased, or is too long for a record, begins anew: the filler numbers all entries.
local stored = redis.call('MGET', KEYS[1])[1] or ''
if stored == ARGV[1] then
  local seq = redis.pcall('INCR', KEYS[2])
  if type(seq) == 'table' or seq < 1 or seq > 999999999999999 then redis.call('SET', KEYS[2], '0') end
  redis.call('SET', KEYS[1], ARGV[2])
end
return (stored == ARGV[1] or stored == ARGV[2]) and 1 or 0
