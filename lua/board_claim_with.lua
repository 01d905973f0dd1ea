-- board_claim_with: with one job of a shard take the others of it that are ready, the oldest first, and those that sleep
-- because they found no place: hosts that come free are planned for all of them at once. Not those that sleep for having
-- nothing to do ('idle'), for a failure, or for an operator.
-- ARGV[2] uuid of the job that is claimed already   ARGV[3] token of its claim   ARGV[4] shard, or ''   ARGV[5] owner
-- ARGV[6] claims' life in ms, 0 never ends   ARGV[7] a token nobody else knows, which tells them from others
-- ARGV[8] how many at most   ARGV[9] key that remembers what this very call answered
-- Returns {uuid, fence, wake, details} of each job taken. The shard of a job is what follows @ in its name, or nothing.
-- Invariants: those of board_claim for each; nothing is taken unless the first claim holds; a call that is made again
-- because its answer was lost gets the same claims.
--@include board
-- Beyond these are postings of shards whose worker is slow or gone: they have messages of their own.
local LOOKED_AT = 2000
local before = answered_before(ARGV[9])
if before then
  return before
end
local shard, owner, life, token, most = ARGV[4], ARGV[5], tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local first = fields_now(ARGV[2], 'state', 'claim')
local answer = {}
local function take_along(uuids, sleeping)
  for _, uuid in ipairs(uuids) do
    if #answer >= most then
      break
    end
    local name = fields_now(uuid, 'name')[1]
    local job = name and (string.match(name, '@(.*)$') or '') == shard and whole(uuid)
    local rests = job and sleeping and (job.rest > now or not redis.call('ZSCORE', AWAITED, uuid))
    if job and not rests then
      if sleeping then
        make_ready(uuid)
      end
      local taken = take(uuid, owner, life, token)
      answer[#answer + 1] = {uuid, taken[3], taken[4], taken[6]}
    end
  end
end

if first[1] == 'claimed' and first[2] == ARGV[3] then
  take_along(redis.call('ZRANGE', READY, 0, LOOKED_AT - 1), false)
  take_along(redis.call('ZRANGE', DELAYED, 0, LOOKED_AT - 1), true)
end
return remember(ARGV[9], answer)
