-- caps: write caps read from PostgreSQL, unless newer ones are there.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 version: server|number of the snapshot the caps were read in,
--         then pairs (at most 250): vertex key, its field names and values as a JSON list. Of a limit int_max_value and
--         int_foreign come first; of one that counts machines two lists of machines come last: those that hold it by what
--         the ledger does not have, and those that hold it so and do not count.
-- Returns {1, written, passed over because newer caps are there}, or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: counters of bookings are not touched, only created as 0; an older read never replaces a newer one of the same
--         server. Another server's numbers say nothing of this one's. Of what a worker of the release before writes of a
--         limit the rest is older.
--@include ledger
--@include counters
local BOTH = 4
local server, number = string.match(ARGV[2], '^(.*|)(%d+)$')
local written, newer = 0, 0
local function is_newer(at)
  local of, stored = string.match(at or '', '^(.*|)(%d+)$')
  return of == server and tonumber(stored) > tonumber(number)
end

for i = 3, #ARGV, 2 do
  local key, fields = ARGV[i], cjson.decode(ARGV[i + 1])
  local limit = string.match(key, '^acct:limit:(.*)$')
  add_to(key, 0, 0)
  local terms = limit and #fields > BOTH
  local caps_newer = is_newer(call('HGET', key, 'caps_at'))
  local terms_newer = not terms or is_newer(call('HGET', key, 'terms_at'))
  if caps_newer and terms_newer then
    newer = newer + 1
  else
    if not terms_newer then
      if type(fields[#fields]) == 'table' then
        local machines = 'acct:machines:' .. limit
        for _, set in ipairs({machines .. ':past', machines .. ':others'}) do
          call('UNLINK', set)
          for _, machine in ipairs(table.remove(fields)) do call('SADD', set, machine) end
        end
      end
      call('HSET', key, 'terms_at', ARGV[2], unpack(fields, BOTH + 1))
    end
    if not caps_newer then
      call('HSET', key, 'caps_at', ARGV[2], unpack(fields, 1, limit and math.min(BOTH, #fields) or #fields))
    end
    written = written + 1
  end
end
return {1, written, newer}
