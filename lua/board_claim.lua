-- board_claim: take a ready job, or the next one: that of the highest priority, the oldest of these, in O(log n).
-- ARGV[2] uuid, or '' for the next   ARGV[3] owner   ARGV[4] claim's life in ms, 0 never ends
-- ARGV[5] ticket of the message that led here, or '': a ticket some claim answered already is stale
-- ARGV[6] life in ms that a claim of the same owner gets instead of being taken again, or ''
-- ARGV[7] a token nobody else knows, by which this claim is told from every other
-- ARGV[8] for the next: key that remembers what a call with this token took
-- Returns {1, uuid, fence, wake, name, details}; {0, 'gone'}; {0, 'held', owner}; {0, 'not_yet', ms to go}; {0, 'trashed'};
-- {0, 'stale'}; {0, 'none'} when no next one is ready.
-- Invariants: at most one live claim a job; every claim has a higher fence than all before; a call that is made again
-- because its answer was lost gets the same claim.
--@include board
local uuid, owner, life, token = ARGV[2], ARGV[3], tonumber(ARGV[4]), ARGV[7]
local mine = uuid ~= '' and uuid or redis.call('GET', ARGV[8]) or ''
local read = fields_now(mine, 'state', 'claim', 'fence', 'wake', 'name', 'details')
if read[1] == 'claimed' and read[2] == token then
  -- Taken by this very call, whose answer was lost. A wake-up since then came before the work begins, so it is no news.
  return {1, mine, tonumber(read[3]), tonumber(read[4]), read[5], read[6]}
end
if uuid == '' then
  for _ = 1, PROMOTED_PER_CALL do
    uuid = redis.call('ZRANGEBYSCORE', READY, '-inf', '+inf', 'LIMIT', 0, 1)[1]
    if not uuid then
      break
    elseif whole(uuid) then
      redis.call('SET', ARGV[8], uuid, 'PX', CALLS_KEPT_MS)
      return take(uuid, owner, life, token)
    end
    forget(uuid)
  end
  return {0, 'none'}
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
return take(uuid, owner, life, token)
