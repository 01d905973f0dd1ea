-- permits_take: take expiring permits, one per layer, in one call.
-- KEYS permits   ARGV[1] owner, 'place|token' or a token alone   ARGV[i + 1] life of KEYS[i] in ms
-- Returns a list of 1 (taken, or already this owner's and prolonged) or 0 (somebody else's), in the order of KEYS.
-- Of a place there is one owner at a time, so a permit of an earlier one of the same place is of somebody who is gone.
local place = string.match(ARGV[1], '^(.*)|')
local granted = {}
for i, key in ipairs(KEYS) do
  local owner = redis.call('GET', key)
  if not owner or owner == ARGV[1] or (place and string.match(owner, '^(.*)|') == place) then
    redis.call('SET', key, ARGV[1], 'PX', ARGV[i + 1])
    granted[i] = 1
  else
    granted[i] = 0
  end
end
return granted
