-- permits_take: have the permits of many frames at a time.
-- KEYS permits   ARGV[1] owner   ARGV[2] life in ms
-- Returns for each permit 1, or 0: another owner has it.
-- Invariant: at most one owner has a permit. Its owner gets the permit again, for its whole life: a call that is made again
-- because its answer was lost grants the same.
local owner, life = ARGV[1], ARGV[2]
local granted = redis.call('MGET', unpack(KEYS))
for i, key in ipairs(KEYS) do
  local free = not granted[i] or granted[i] == owner
  if free then
    redis.call('SET', key, owner, 'PX', life)
  end
  granted[i] = free and 1 or 0
end
return granted
