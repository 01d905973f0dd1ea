-- board_overdue: the jobs whose message nobody took in time, or for which nobody sent one when their rest was over, and a
-- ticket of a message for each.
-- ARGV[2] resend after ms (see is_overdue), and so long after the end of a rest   ARGV[3] most jobs to look at
-- Returns for each: uuid, details, ticket, 1 if a message was sent before in vain else 0.
-- Invariants: of many that ask one gets the ticket; a job for which no message is to be sent, or that is at work, at rest, in
-- the trash or gone, is left alone.
--@include board
local now, resend = now_ms(), tonumber(ARGV[2])
promote(now)
local answer = {}
for _, uuid in ipairs(redis.call('ZRANGEBYSCORE', AWAITED, '-inf', now - resend, 'LIMIT', 0, ARGV[3])) do
  local job = whole(uuid)
  if not job then
    scrap(uuid)
  elseif job.state ~= 'ready' then
    redis.call('ZREM', AWAITED, uuid)
  elseif is_overdue(job.sent, job.tries, resend, now) then
    if job.sent > 0 then
      redis.call('HINCRBY', PREFIX .. uuid, 'tries', 1)
    end
    answer[#answer + 1] = uuid
    answer[#answer + 1] = job.details
    answer[#answer + 1] = next_ticket(uuid, now)
    answer[#answer + 1] = job.sent > 0 and 1 or 0
  end
end
return answer
