-- board_post: post one job.
-- ARGV[2] uuid   ARGV[3] name   ARGV[4] idempotency key or ''   ARGV[5] payload   ARGV[6] priority rank 0..4
-- ARGV[7] delay in ms before which nobody gets it
-- ARGV[8] key that remembers that this very call posted the job, or none
-- Returns {uuid, fields and values} of the job that has this key, or that was posted; a call that is made again because its
-- answer was lost gets those with which it posted the job, which may be done and gone by now.
-- Invariants: in one step the job is listed completely or not at all; one job per idempotency key; a call posts one job.
--@include board
empty_trash()
local uuid, key, delay = ARGV[2], ARGV[4], tonumber(ARGV[7])
local before = answered_before(ARGV[8])
if before then
  return {uuid, {'name', ARGV[3], 'key', key, 'details', ARGV[5], 'prio', ARGV[6], 'seq', before[1], 'created', before[2]}}
end
local existing = redis.call('HGET', NAMES, key)
if existing and not whole(existing) then
  forget(existing)
elseif existing then
  return {existing, redis.call('HGETALL', PREFIX .. existing)}
end
remember(ARGV[8], {create(uuid, ARGV[3], key, ARGV[5], ARGV[6]), format(now)})
if delay > 0 then
  move(uuid, 'delayed', DELAYED, now + delay)
else
  make_ready(uuid)
end
return {uuid, redis.call('HGETALL', PREFIX .. uuid)}
