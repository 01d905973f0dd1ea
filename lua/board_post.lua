-- board_post: post one job.
-- ARGV[2] uuid   ARGV[3] name   ARGV[4] idempotency key or ''   ARGV[5] payload   ARGV[6] priority rank 0..4
-- ARGV[7] delay in ms before which nobody gets it
-- ARGV[8] key that remembers that this very call posted the job, or none
-- Returns {uuid, fields and values} of the job that has this key, or that was posted: now, or by this very call when it was
-- made before and its answer lost; then without the fields that a job gets later, should it be done and gone by now.
-- Invariants: in one step the job is listed completely or not at all; one job per idempotency key;
-- a call that is made again because its answer was lost posts nothing more, though the job may be done by then.
--@include board
empty_trash()
local uuid, key, delay = ARGV[2], ARGV[4], tonumber(ARGV[7])
if redis.call('EXISTS', PREFIX .. uuid) == 1 then
  return {uuid, redis.call('HGETALL', PREFIX .. uuid)}
end
local before = ARGV[8] and redis.call('GET', ARGV[8])
if before then
  local seq, created = string.match(before, '^(%d+) (%d+)$')
  return {uuid, {'name', ARGV[3], 'key', key, 'details', ARGV[5], 'prio', ARGV[6], 'seq', seq, 'created', created}}
end
if key ~= '' then
  local existing = redis.call('HGET', NAMES, key)
  if existing and not whole(existing) then
    forget(existing)
  elseif existing then
    return {existing, redis.call('HGETALL', PREFIX .. existing)}
  end
end
local seq = create(uuid, ARGV[3], key, ARGV[5], ARGV[6])
if ARGV[8] then
  redis.call('SET', ARGV[8], seq .. ' ' .. format(now), 'PX', CALLS_KEPT_MS)
end
if delay > 0 then
  make_delayed(uuid, now + delay)
else
  make_ready(uuid)
end
return {uuid, redis.call('HGETALL', PREFIX .. uuid)}
