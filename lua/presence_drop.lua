-- presence_drop: take one's own presence away.   KEYS presence keys   ARGV[1] token   Returns how many were ours.
-- The index keeps the names, so that what is left in the instance's queues is found and moved.
local dropped = 0
for _, key in ipairs(KEYS) do
  local held = redis.call('GET', key)
  if held and cjson.decode(held).token == ARGV[1] then
    dropped = dropped + redis.call('DEL', key)
  end
end
return dropped
