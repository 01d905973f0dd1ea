-- caps: write caps read from PostgreSQL, unless newer ones are there.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 version: server|number of the snapshot the caps were read in,
--         then pairs (at most 250): vertex key, its field names and values as a JSON list, which may end with a list of
--         the machines that hold a limit by what the ledger does not have
-- Returns {1, written, passed over because newer caps are there}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: booked counters are not touched, only created as 0; an older read never replaces a newer one of the same
--         server. Another server's numbers say nothing of this one's.
--@include ledger
--@include counters
local server, number = string.match(ARGV[2], '^(.*|)(%d+)$')
local written, newer = 0, 0
for i = 3, #ARGV, 2 do
  local key = ARGV[i]
  add_to(key, 0, 0)
  local of, stored = string.match(call('HGET', key, 'caps_at') or '', '^(.*|)(%d+)$')
  if of == server and tonumber(stored) > tonumber(number) then
    newer = newer + 1
  else
    local fields = cjson.decode(ARGV[i + 1])
    if type(fields[#fields]) == 'table' then
      local others, machines = string.gsub(key, '^acct:limit:', 'acct:machines:') .. ':others', table.remove(fields)
      call('UNLINK', others)
      for j = 1, #machines do call('SADD', others, machines[j]) end
    end
    call('HSET', key, 'caps_at', ARGV[2], unpack(fields))
    written = written + 1
  end
end
return {1, written, newer}
