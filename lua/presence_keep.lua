-- presence_keep: announce or refresh the presence of one process under all its names at once.
-- KEYS[1] index of instances (sorted set, score: last refresh in ms)   KEYS[2..] as many presence keys as records
-- ARGV[1] token of this incarnation   ARGV[2] life in ms   ARGV[3] token that may be replaced, or ''
-- ARGV[4..] a JSON record for each presence key, with the field "token"
-- Returns {1}; {0, key, record found there} when another incarnation holds one of the keys. Then nothing was written.
-- Invariant: at most one incarnation is present under a name.
for i = 2, #KEYS do
  local held = redis.call('GET', KEYS[i])
  if held then
    local readable, record = pcall(cjson.decode, held)
    local token = readable and type(record) == 'table' and record.token
    if token ~= ARGV[1] and (ARGV[3] == '' or token ~= ARGV[3]) then
      return {0, KEYS[i], held}
    end
  end
end
local t = redis.call('TIME')
local now = string.format('%.0f', tonumber(t[1]) * 1000 + math.floor(tonumber(t[2]) / 1000))
for i = 2, #KEYS do
  redis.call('SET', KEYS[i], ARGV[i + 2], 'PX', ARGV[2])
  redis.call('ZADD', KEYS[1], now, KEYS[i])
end
return {1}
