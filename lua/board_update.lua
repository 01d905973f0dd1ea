-- board_update: what an operator does to a job, whoever has it.
-- ARGV[2] uuid   ARGV[3] how   ARGV[4] text or milliseconds   ARGV[5] force (1|0)
-- ARGV[6] key that remembers what this very call answered, or ''
-- how: 'trash'   put aside with ARGV[4] as the reason; with force even under a claim, whose owner then loses it
--      'restore' from the trash, ready at once, failures forgotten
--      'rest'    not before ARGV[4] ms from now, whatever wakes it; 0 ends the rest
--      'delete'  from the trash, for good
--      'withdraw' for good, while it is ready or rests
-- Returns {1, new state}; {0, 'gone'}; {0, 'held', owner}; {0, 'not_trashed'}; {0, 'trashed'}.
-- Invariants: the job is in exactly one place afterwards; as board_end for a call that is made again.
--@include board
local now = now_ms()
promote(now)
local before = answered_before(ARGV[6])
if before then
  return before
end
local uuid, how = ARGV[2], ARGV[3]
local job = PREFIX .. uuid
local read = whole(uuid)
if not read then
  return {0, 'gone'}
end
local state = read.state
if how == 'restore' or how == 'delete' then
  if state ~= 'trash' then
    return {0, 'not_trashed'}
  end
  redis.call('ZREM', TRASH, uuid)
  if how == 'delete' then
    forget(uuid)
    emit('REMOVED', uuid, read.name)
    return remember(ARGV[6], {1, 'complete'})
  end
  redis.call('ZADD', LISTED, rank(read.prio, read.seq), uuid)
  redis.call('HSET', job, 'failures', 0, 'error', '', 'sent', 0, 'rest', 0)
  make_ready(uuid)
  set_due(uuid, now)
  return remember(ARGV[6], {1, 'ready'})
end
if state == 'trash' then
  return {0, 'trashed'}
end
if how == 'trash' then
  if state == 'claimed' and ARGV[5] ~= '1' then
    return {0, 'held', read.owner}
  end
  redis.call('ZREM', READY, uuid)
  redis.call('ZREM', DELAYED, uuid)
  redis.call('ZREM', CLAIMED, uuid)
  shelve(uuid, read.name, ARGV[4], now)
  return remember(ARGV[6], {1, 'trash'})
end
if how == 'withdraw' then
  if state == 'claimed' then
    return {0, 'held', read.owner}
  end
  redis.call('ZREM', READY, uuid)
  redis.call('ZREM', DELAYED, uuid)
  forget(uuid)
  emit('REMOVED', uuid, read.name)
  return remember(ARGV[6], {1, 'complete'})
end
local until_ms = tonumber(ARGV[4]) > 0 and now + tonumber(ARGV[4]) or 0
redis.call('HSET', job, 'rest', format(until_ms))
if state ~= 'claimed' then
  redis.call('ZREM', READY, uuid)
  redis.call('ZREM', DELAYED, uuid)
  if until_ms > 0 then
    make_delayed(uuid, until_ms)
    set_due(uuid, until_ms)
    state = 'delayed'
  else
    redis.call('HSET', job, 'sent', 0)
    make_ready(uuid)
    set_due(uuid, now)
    state = 'ready'
  end
end
return remember(ARGV[6], {1, state})
