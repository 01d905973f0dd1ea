-- board_end: end a claim, or prolong it.
-- ARGV[2] uuid   ARGV[3] owner   ARGV[4] fence   ARGV[5] token   ARGV[6] how   ARGV[7] delay in ms, or life
-- ARGV[8] wake seen at the claim   ARGV[9] why it failed, one line   ARGV[10] error text
-- ARGV[11] key that remembers what this very call answered, or none
-- ARGV[12] ms after which a message that nobody took is sent again
-- how: 'extend'  the claim lives so long from now, 0 for ever
--      'again'   ready at once, a message is to be sent
--      'abandon' ready at once, no message (another worker may take it)
--      'sleep'   not before now + delay; ready at once instead if it was woken during the claim
--      'idle'    like sleep, but no message is to be sent at its end: there was nothing to do
--      'put_off' like sleep, but nothing was learnt about the job: its failures in a row stay as they are
--      'fail'    not before now + delay, whatever wakes it; the failure is counted and kept with why and the error text
--      'consume' done: the job is gone
--      'trash'   kept aside with the error text
-- Returns {1, ticket of the message to send or 0}; {0, 'gone'}; {0, 'unclaimed'}; {0, 'other', owner};
-- {0, 'lost'} when the same owner has a later claim.
-- Invariants: only the claim's owner under its fence and token does anything; a claim that ran out is never revived; the job
-- is in exactly one place afterwards; a job that an operator put to sleep sleeps on; a call that is made again because its answer
-- was lost gets the same answer, and changes nothing.
--@include board
local before = answered_before(ARGV[11])
if before then
  return before
end
local uuid, how, delay, text = ARGV[2], ARGV[6], tonumber(ARGV[7]), ARGV[10]
local job = PREFIX .. uuid
local state, owner, fence, token, wake, rest, name = unpack(
  fields_now(uuid, 'state', 'owner', 'fence', 'claim', 'wake', 'rest', 'name'))
if not state then
  return {0, 'gone'}
elseif state ~= 'claimed' then
  return {0, 'unclaimed'}
elseif owner ~= ARGV[3] then
  return {0, 'other', owner}
elseif fence ~= ARGV[4] or token ~= ARGV[5] then
  -- A Redis that was restored or failed over to an older state may give a fence out twice, but no token.
  return {0, 'lost'}
elseif how == 'extend' then
  set_expiry(uuid, delay)
  return {1, 0}
end
rest = tonumber(rest)
redis.call('HSET', job, 'modified', format(now))
if how == 'fail' then
  if redis.call('HINCRBY', job, 'failures', 1) == 1 then
    redis.call('HSET', job, 'failing', format(now))
  end
  rest, how = math.max(rest, now + delay), 'sleep'
  redis.call('HSET', job, 'error', text, 'reason', ARGV[9], 'rest', format(rest))
elseif how == 'put_off' then
  how = 'sleep'
elseif how ~= 'abandon' then
  redis.call('HSET', job, 'failures', 0)
end

local ticket, rests = 0, how == 'sleep' or how == 'idle'
if how == 'consume' then
  forget(uuid)
  emit('REMOVED', uuid, name)
elseif how == 'trash' then
  make_trashed(uuid, name, text)
elseif rest > now or (rests and wake == ARGV[8]) then
  local due = math.max(rest, rests and now + delay or 0)
  move(uuid, 'delayed', DELAYED, due)
  if how ~= 'idle' then
    set_due(uuid, due)
  end
else
  make_ready(uuid)
  ticket = how ~= 'abandon' and next_ticket(uuid, false, tonumber(ARGV[12])) or 0
end
return remember(ARGV[11], {1, ticket})
