-- reply_push: answer the caller that waits for a job.
-- KEYS[1] reply list   KEYS[2] job hash   ARGV[1] answer (JSON)   ARGV[2] life in seconds   ARGV[3] status
-- Returns 1, or 0 when the job was answered before.
-- Invariants: list and hash say the same, both end after their life; the first answer stands.
if redis.call('HGET', KEYS[2], 'ended_at') then
  return 0
end
redis.call('HSET', KEYS[2], 'status', ARGV[3], 'output', ARGV[1], 'ended_at', redis.call('TIME')[1])
redis.call('EXPIRE', KEYS[2], ARGV[2])
redis.call('RPUSH', KEYS[1], ARGV[1])
redis.call('EXPIRE', KEYS[1], ARGV[2])
return 1
