-- presence_drop: take one's own presence away.   KEYS presence keys   ARGV[1] token   Returns nothing.
-- The index keeps the names, so that what is left in the instance's queues is found and moved.
for _, key in ipairs(KEYS) do
  local held = redis.call('GET', key)
  if held and cjson.decode(held).token == ARGV[1] then
    redis.call('DEL', key)
  end
end
