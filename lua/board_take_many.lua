-- board_take_many: have many jobs at a time, each of which is on the board only while somebody has it.
-- ARGV[2] owner   ARGV[3] token: tells what is had by this from what the same owner had before
-- ARGV[4] payload of each   ARGV[5] priority rank of each   ARGV[6] retention of trash in ms
-- ARGV[7..] pairs: uuid, life of the claim in ms
-- Returns for each pair the fence of the claim, or 0: somebody else has the job, or it rests or is in the trash.
-- Invariants: at most one live claim a job, under a higher fence than any before, also before it was gone and posted anew:
-- a new job's is its number, and there were as many claims at most.
-- Of an owner there is one at a time: what an earlier one of the same name left is the present one's. A call that is made
-- again because its answer was lost has the same claims. What nobody has any more is forgotten, some at each call; nothing
-- waits because the clock was put back. That such a job comes and goes is no event; that its claim ran out is.
--@include board
local FORGOTTEN_PER_CALL = 20
local now = now_ms()
local owner, token, details, prio = ARGV[2], ARGV[3], ARGV[4], ARGV[5]
promote(now)
empty_trash(now, tonumber(ARGV[6]))
for _, uuid in ipairs(redis.call('ZRANGE', READY, 0, FORGOTTEN_PER_CALL - 1)) do
  forget(uuid)
  emit('REMOVED', uuid, uuid)
end

local function take_posted(uuid, life)
  local job = PREFIX .. uuid
  local read = redis.call('HMGET', job, 'state', 'owner', 'claim', 'fence', 'expires', 'modified')
  local claimed, same = read[1] == 'claimed', read[2] == owner
  if claimed and same and read[3] == token then
    set_expiry(uuid, life, now)
    return tonumber(read[4])
  end
  local over = claimed and (tonumber(read[5]) <= now or tonumber(read[6]) > now)
  if read[1] == 'ready' or over or (claimed and same) then
    return (take(uuid, owner, life, now, token))
  end
  return 0
end

-- As create() and take() do for one: written in full once and copied, and one command for all on each index.
local function post_taken(new)
  local listed, claimed, first = {}, {}, nil
  for _, it in ipairs(new) do
    local uuid, seq, expires = it.uuid, format(it.seq), format(now + it.life)
    local job = PREFIX .. uuid
    if first then
      redis.call('COPY', first, job)
      redis.call('HSET', job, 'name', uuid, 'seq', seq, 'fence', seq, 'expires', expires)
    else
      first = job
      redis.call('HSET', job, unpack(fields_of(uuid, '', details, prio, seq, now)))
      redis.call('HSET', job, 'state', 'claimed', 'owner', owner, 'fence', seq, 'claim', token, 'expires', expires,
        'modified', format(now))
    end
    listed[#listed + 1], listed[#listed + 2] = format(rank(prio, seq)), uuid
    claimed[#claimed + 1], claimed[#claimed + 2] = expires, uuid
  end
  redis.call('ZADD', LISTED, unpack(listed))
  redis.call('ZADD', CLAIMED, unpack(claimed))
end

local wanted, jobs = {}, {}
for i = 7, #ARGV, 2 do
  wanted[#wanted + 1] = {uuid = ARGV[i], life = tonumber(ARGV[i + 1])}
  jobs[#jobs + 1] = PREFIX .. ARGV[i]
end
local seq = redis.call('INCRBY', SEQ, #wanted) - #wanted
local some_posted = redis.call('EXISTS', unpack(jobs)) > 0
local fences, new = {}, {}
for i, it in ipairs(wanted) do
  it.seq = seq + i
  local posted = some_posted and redis.call('EXISTS', jobs[i]) == 1
  if posted and whole(it.uuid) then
    fences[i] = take_posted(it.uuid, it.life)
  else
    if posted then
      forget(it.uuid)
    end
    fences[i] = it.seq
    new[#new + 1] = it
  end
end
if #new > 0 then
  post_taken(new)
end
return fences
