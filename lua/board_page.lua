-- board_page: a page of jobs, by priority and then age.
-- ARGV[2] which: 'ready', 'listed' or 'trash'   ARGV[3] score after which to start ('-inf' for the first page)
-- ARGV[4] jobs a page, and as many more as share the score of its last
-- Returns a list of {uuid, score, {the job's fields and values, but lost ones}}, of this moment: it promotes first.
--@include board
local set = ({ready = READY, listed = LISTED, trash = TRASH})[ARGV[2]]
local from = ARGV[3] == '-inf' and '-inf' or '(' .. ARGV[3]
local found = redis.call('ZRANGEBYSCORE', set, from, '+inf', 'WITHSCORES', 'LIMIT', 0, ARGV[4])
if #found > 0 then
  found = redis.call('ZRANGEBYSCORE', set, from, found[#found], 'WITHSCORES')
end
local answer = {}
for i = 1, #found, 2 do
  local fields = redis.pcall('HGETALL', PREFIX .. found[i])
  answer[#answer + 1] = {found[i], found[i + 1], fields.err and {} or fields}
end
return answer
