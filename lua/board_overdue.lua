-- board_overdue: the jobs whose message nobody took in time, and a ticket of another message for each.
-- ARGV[2] resend after ms (see is_overdue)   ARGV[3] most jobs to look at
-- Returns for each: uuid, details, ticket.
-- Invariants: of many that ask one gets the ticket; a job for which none was ever sent, or that is at work, at rest, in the
-- trash or gone, is left alone.
--@include board
local now, resend = now_ms(), tonumber(ARGV[2])
promote(now)
local answer = {}
for _, uuid in ipairs(redis.call('ZRANGEBYSCORE', AWAITED, '-inf', now - resend, 'LIMIT', 0, ARGV[3])) do
  local read = redis.call('HMGET', PREFIX .. uuid, 'state', 'sent', 'tries', 'details')
  local sent = tonumber(read[2]) or 0
  if read[1] ~= 'ready' or sent == 0 then
    redis.call('ZREM', AWAITED, uuid)
  elseif is_overdue(sent, tonumber(read[3]), resend, now) then
    redis.call('HINCRBY', PREFIX .. uuid, 'tries', 1)
    answer[#answer + 1] = uuid
    answer[#answer + 1] = read[4]
    answer[#answer + 1] = next_ticket(uuid, now)
  end
end
return answer
