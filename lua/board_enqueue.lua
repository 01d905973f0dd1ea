-- board_enqueue: post jobs by name, once each, and say for which a message should be sent now.
-- ARGV[2] ms after which a message that nobody took is sent again
-- ARGV[3..] groups of four: name, details (JSON), priority rank 0..4, wake (1|0)
-- Returns for each group: {uuid, ticket of the message to send (0: none), a message was not answered (1|0), the job sleeps (1|0)}.
-- Invariants: one job per name, however often it is enqueued; a wake is never lost: it either makes the job ready or
-- moves `wake`, which the present claim compares when it ends; a job that an operator put to sleep is not woken; nothing
-- waits because the clock was put back; whatever of a job or of the board's own keys was lost or damaged, the job is ready, and sent for.
-- Before anything is read: a key of the board that was made one of another type would end every call.
for i, kind in ipairs({'zset', 'zset', 'zset', 'hash', 'string', 'stream', 'zset', 'zset', 'zset'}) do
  local type = redis.call('TYPE', KEYS[i]).ok
  if type ~= kind and type ~= 'none' then
    redis.call('DEL', KEYS[i])
  end
end
--@include board
empty_trash()
local PLACES = {ready = READY, delayed = DELAYED, claimed = CLAIMED, trash = TRASH}
-- What every job has, of one that can be read and is where its state says; nil for any other.
local function readable(uuid, details)
  local job = whole(uuid)
  local place = job and PLACES[job.state]
  local there = place and redis.call('ZSCORE', place, uuid)
  local decoded, payload = pcall(cjson.decode, there and job.details ~= details and job.details or '{}')
  return there and decoded and type(payload) == 'table' and job or nil
end

-- Whether a message is due for a ready job. One of a moment that is still to come was sent before the clock was put back.
local function is_due(uuid, sent)
  local due = sent > 0 and sent <= now and redis.call('ZSCORE', AWAITED, uuid)
  return not due or tonumber(due) <= now
end

local resend = tonumber(ARGV[2])
local answer = {}
for i = 3, #ARGV, 4 do
  local name, details, prio, wake = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3] == '1'
  local uuid = redis.call('HGET', NAMES, name)
  local job = uuid and readable(uuid, details)
  local send, in_vain, rests = false, false, false
  local state, modified = job and job.state, job and tonumber(job.modified) or 0
  if job and wake then
    redis.call('HINCRBY', PREFIX .. uuid, 'wake', 1)
  end
  if not job then
    if uuid then
      forget(uuid)
    end
    uuid = redis.sha1hex(PREFIX .. name .. ':' .. redis.call('INCR', SEQ) .. ':' .. now)
    create(uuid, name, name, details, prio)
    make_ready(uuid)
    send = true
  elseif state == 'delayed' and (wake or modified > now) and job.rest <= now then
    make_ready(uuid)
    send = true
  elseif state == 'delayed' then
    rests = true
  elseif state == 'claimed' and modified > now then
    -- Made at a moment that is still to come: its life is counted from now, unless its owner prolonged it since.
    redis.call('HSET', PREFIX .. uuid, 'modified', format(now))
    if job.expires > modified and job.expires < math.huge then
      set_expiry(uuid, job.expires - modified)
    end
  elseif state == 'ready' and is_due(uuid, job.sent) then
    send, in_vain = true, job.sent > 0
  end
  local ticket = send and next_ticket(uuid, in_vain, resend) or 0
  answer[#answer + 1] = {uuid, ticket, in_vain and 1 or 0, rests and 1 or 0}
end
return answer
