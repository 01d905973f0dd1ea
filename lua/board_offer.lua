-- board_offer: post jobs by name, once each, and say for which a message should be sent now.
-- ARGV[2] resend after ms   ARGV[3..] groups of four: name, details (JSON), priority rank 0..4, wake (1|0)
-- Returns for each group: uuid, send (1|0), state before.
-- Invariants: one job per name, however often it is offered; a wake is never lost: it either makes the job ready or
-- moves `wake`, which the present claim compares when it ends.
--@include board
local now = now_ms()
promote(now)
local resend = tonumber(ARGV[2])
local answer = {}
for i = 3, #ARGV, 4 do
  local name, details, prio, wake = ARGV[i], ARGV[i + 1], ARGV[i + 2], ARGV[i + 3] == '1'
  local uuid = redis.call('HGET', NAMES, name)
  local state, send = 'new', 0
  if uuid then
    state = redis.call('HGET', PREFIX .. uuid, 'state')
    if wake then
      redis.call('HINCRBY', PREFIX .. uuid, 'wake', 1)
    end
    if state == 'delayed' and wake then
      redis.call('ZREM', DELAYED, uuid)
      make_ready(uuid)
      send = 1
    elseif state == 'ready' and now - tonumber(redis.call('HGET', PREFIX .. uuid, 'sent')) >= resend then
      send = 1
    end
  else
    local seq = redis.call('INCR', SEQ)
    uuid = redis.sha1hex(PREFIX .. name .. ':' .. seq)
    redis.call('HSET', PREFIX .. uuid, 'name', name, 'details', details, 'prio', prio, 'created', format(now),
      'modified', '', 'seq', seq, 'owner', '', 'fence', 0, 'expires', 0, 'wake', 0, 'sent', 0, 'failures', 0)
    redis.call('HSET', NAMES, name, uuid)
    make_ready(uuid)
    emit('POSTED', uuid, name)
    send = 1
  end
  if send == 1 then
    redis.call('HSET', PREFIX .. uuid, 'sent', format(now))
  end
  answer[#answer + 1] = uuid
  answer[#answer + 1] = send
  answer[#answer + 1] = state
end
return answer
