-- Refuses a periodic task of a former leader. Such a task gives one key more (FENCE; nil of every other caller), where
-- the newest leader's fence is recorded, and its own leader's fence as the last of ARGV. When a newer one is recorded
-- nothing is done, and the answer is {0, 'fenced', newest, its own}.
if FENCE then
  local fence, newest = table.remove(ARGV), redis.call('GET', FENCE)
  if newest and tonumber(newest) > tonumber(fence) then
    return {0, 'fenced', newest, fence}
  end
end
