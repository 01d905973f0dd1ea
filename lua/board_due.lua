-- board_due: take the jobs for which a message is due, each with the ticket of that message, those first that wait longest.
-- ARGV[2] ms after which a message that nobody took is sent again
-- Returns ms until the first claim runs out (-1: none does), then for each job: {uuid, details, ticket, when an unanswered
-- message was sent (ms; 0: there is none, 1: its claim ran out)}.
-- Invariants: of many callers one gets the ticket; a job that is not ready gets none, nor does one that sleeps for want of work.
--@include board
-- More than are lost at once. With more than that due, a farm is short of workers, not of messages.
local JOBS_PER_CALL = 200
local resend = tonumber(ARGV[2])
local expiry = tonumber(redis.call('ZRANGE', CLAIMED, 0, 0, 'WITHSCORES')[2] or 'inf') or math.huge
local answer = {expiry < math.huge and math.max(0, expiry - now) or -1}
for _, uuid in ipairs(redis.call('ZRANGEBYSCORE', AWAITED, '-inf', now, 'LIMIT', 0, JOBS_PER_CALL)) do
  local job = whole(uuid)
  if not job then
    forget(uuid)
  elseif job.state == 'ready' then
    answer[#answer + 1] = {uuid, job.details, next_ticket(uuid, job.sent > 0, resend), job.sent}
  elseif tonumber(redis.call('ZSCORE', DELAYED, uuid) or 'inf') > now then
    -- What rests and is due waits only to be promoted, which is bounded: it keeps its place.
    redis.call('ZREM', AWAITED, uuid)
  end
end
return answer
