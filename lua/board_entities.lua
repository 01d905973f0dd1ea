-- board_entities: the entities that are registered with a board; those whose registration is over are forgotten.
-- KEYS 1 set with the keys of their records, which have the same hash tag
-- Returns the records, in any order.
-- Invariant: an entity stays listed for as long as its record lives, whenever it registers.
local records = {}
for _, key in ipairs(redis.call('SMEMBERS', KEYS[1])) do
  local record = redis.call('GET', key)
  if record then
    records[#records + 1] = record
  else
    redis.call('SREM', KEYS[1], key)
  end
end
return records
