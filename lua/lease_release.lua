-- lease_release: give up a lease.
-- KEYS[1] lease   ARGV[1] token   Returns 1 if the token held it, else 0.
-- Invariant: nobody's lease but one's own is ever deleted.
local held = redis.call('GET', KEYS[1])
if held and string.match(held, '^(.*)|%d+$') == ARGV[1] then
  return redis.call('DEL', KEYS[1])
end
return 0
