-- permits_drop: give permits back.   KEYS permits   ARGV[1] owner   Returns how many were this owner's.
local dropped = 0
for _, key in ipairs(KEYS) do
  if redis.call('GET', key) == ARGV[1] then
    dropped = dropped + redis.call('DEL', key)
  end
end
return dropped
