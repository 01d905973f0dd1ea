-- board_update: what an operator does to a job, also to a claimed one.
-- ARGV[2] uuid   ARGV[3] how   ARGV[4] text or milliseconds   ARGV[5] force (1|0)
-- ARGV[6] key that remembers what this very call answered, or ''
-- ARGV[7] of 'trash': the moment, ms, since which it counts as put aside; anything else means now
-- how: 'trash'   put aside with ARGV[4] as the reason; with force even under a claim, whose owner then loses it
--      'restore' from the trash, ready at once, failures forgotten
--      'rest'    sleep for ARGV[4] ms from now, whatever wakes the job; 0 ends the sleep
--      'withdraw' take it off the board for good, while it is ready or sleeps
-- Returns {1}; {0, 'gone'}; {0, 'held', owner}; {0, 'not_trashed'}; {0, 'trashed'}.
-- Invariants: the job is in exactly one place afterwards; as board_end for a call that is made again.
--@include board
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
if how == 'restore' then
  if state ~= 'trash' then
    return {0, 'not_trashed'}
  end
elseif state == 'trash' then
  return {0, 'trashed'}
elseif state == 'claimed' and (how == 'withdraw' or (how == 'trash' and ARGV[5] ~= '1')) then
  return {0, 'held', read.owner}
end

if how == 'withdraw' then
  forget(uuid)
  emit('REMOVED', uuid, read.name)
elseif how == 'trash' then
  make_trashed(uuid, read.name, ARGV[4], ARGV[7])
else
  local due = now
  if how == 'restore' then
    redis.call('ZADD', LISTED, rank(read.prio, read.seq), uuid)
    redis.call('HSET', job, 'failures', 0, 'error', '', 'rest', 0)
  else
    due = now + tonumber(ARGV[4])
    redis.call('HSET', job, 'rest', due > now and format(due) or 0)
  end
  if state ~= 'claimed' then
    if due > now then
      move(uuid, 'delayed', DELAYED, due)
    else
      make_ready(uuid)
    end
    set_due(uuid, due)
  end
end
return remember(ARGV[6], {1})
