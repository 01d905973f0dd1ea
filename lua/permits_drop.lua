-- permits_drop: give the permits of many frames back.
-- KEYS permits   ARGV[1] owner
-- Returns how many of the permits the owner had; these are gone.
-- Invariant: another owner's permit stays.
local own = {}
for i, owner in ipairs(redis.call('MGET', unpack(KEYS))) do
  if owner == ARGV[1] then
    own[#own + 1] = KEYS[i]
  end
end
return #own > 0 and redis.call('DEL', unpack(own)) or 0
