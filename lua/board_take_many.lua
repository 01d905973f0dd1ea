-- board_take_many: have many jobs at a time, each of which is on the board only while it is claimed.
-- ARGV[2] owner   ARGV[3] token: tells what is had by this from what the same owner had before
-- ARGV[4] payload of each   ARGV[5] priority rank of each
-- ARGV[6..] pairs: uuid, life of the claim in ms
-- Returns for each pair the fence of the claim, or 0: another owner has the job, or it rests or is in the trash.
-- Invariants: at most one live claim a job, under a higher fence than any before, also before it was gone and posted anew:
-- a new job's is its number, and there were as many claims at most. Of an owner there is one at a time: what an earlier one
-- left is its. A call that is made again because its answer was lost has the same claims. What nobody has any more is
-- forgotten, some at each call; nothing waits because the clock was put back. Such a job is no event; its claim's expiry is.
--@include board
local FORGOTTEN_PER_CALL = 20
local owner, token, details, prio = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
empty_trash()
for _, uuid in ipairs(redis.call('ZRANGE', READY, 0, FORGOTTEN_PER_CALL - 1)) do
  forget(uuid)
  emit('REMOVED', uuid, uuid)
end

local jobs = {}
for i = 6, #ARGV, 2 do
  jobs[#jobs + 1] = PREFIX .. ARGV[i]
end
local some_posted = redis.call('EXISTS', unpack(jobs)) > 0
local before = redis.call('INCRBY', SEQ, #jobs) - #jobs
local fences, first, listed, claimed = {}, nil, {}, {}
for i, job in ipairs(jobs) do
  local uuid, life = ARGV[4 + 2 * i], tonumber(ARGV[5 + 2 * i])
  local posted = some_posted and redis.call('EXISTS', job) == 1
  local had = posted and whole(uuid)
  if had then
    local claimed, same = had.state == 'claimed', had.owner == owner
    if claimed and same and fields_now(uuid, 'claim')[1] == token then
      set_expiry(uuid, life)
      fences[i] = had.fence
    elseif had.state == 'ready' or (claimed and (same or had.expires <= now or tonumber(had.modified) > now)) then
      fences[i] = take(uuid, owner, life, token)[3]
    else
      fences[i] = 0
    end
  else
    if posted then
      forget(uuid)
    end
    -- As create() and take() do for one: written in full once and copied, and one command for all on each index.
    local seq, expires = before + i, format(now + life)
    if first then
      redis.call('COPY', first, job)
      redis.call('HSET', job, 'name', uuid, 'seq', seq, 'fence', seq, 'expires', expires)
    else
      first = job
      redis.call('HSET', job, unpack(fields_of(uuid, '', details, prio, seq)))
      redis.call('HSET', job, 'state', 'claimed', 'owner', owner, 'fence', seq, 'claim', token, 'expires', expires,
        'modified', format(now))
    end
    fences[i] = seq
    listed[#listed + 1], listed[#listed + 2] = format(rank(prio, seq)), uuid
    claimed[#claimed + 1], claimed[#claimed + 2] = expires, uuid
  end
end
if first then
  redis.call('ZADD', LISTED, unpack(listed))
  redis.call('ZADD', CLAIMED, unpack(claimed))
end
return fences
