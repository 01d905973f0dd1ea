-- board_claim: take a ready job.
-- ARGV[2] uuid   ARGV[3] owner   ARGV[4] claim's life in ms, 0 never ends
-- ARGV[5] ticket of the message that led here, or '': a ticket some claim answered already is stale
-- ARGV[6] life in ms that a claim of the same owner gets instead of being taken again, or ''
-- ARGV[7] a token nobody else knows, by which this claim is told from every other
-- Returns {1, uuid, fence, wake, name, details}; {0, 'gone'}; {0, 'held', owner}; {0, 'not_yet', ms to go}; {0, 'trashed'};
-- {0, 'stale'}.
-- Invariants: at most one live claim a job; every claim has a higher fence than all before; a call that is made again
-- because its answer was lost gets the same claim.
--@include board
local uuid, owner = ARGV[2], ARGV[3]
local mine = taken_before(uuid, ARGV[7])
if mine then
  return mine
end
local job = whole(uuid)
if not job then
  forget(uuid)
  return {0, 'gone'}
elseif ARGV[5] ~= '' and tonumber(ARGV[5]) <= job.done then
  return {0, 'stale'}
elseif job.state == 'claimed' then
  if ARGV[6] ~= '' and job.owner == owner then
    set_expiry(uuid, tonumber(ARGV[6]))
  end
  return {0, 'held', job.owner}
elseif job.state == 'delayed' then
  return {0, 'not_yet', (tonumber(redis.call('ZSCORE', DELAYED, uuid) or now)) - now}
elseif job.state == 'trash' then
  return {0, 'trashed'}
end
return take(uuid, owner, tonumber(ARGV[4]), ARGV[7])
