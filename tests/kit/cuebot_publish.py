"""What a Cuebot that publishes its releases runs after each commit, as the accounting reference has it."""

PUBLISH = """
for i = 1, 5 do
  redis.call('HINCRBY', KEYS[i], 'int_cores', ARGV[1])
  redis.call('HINCRBY', KEYS[i], 'int_gpus', ARGV[2])
end
return redis.call('INCR', KEYS[6])
"""
"""Five pairs of HINCRBY and the sequence number. KEYS 1-5 subscription, folder, job, layer, point, 6 ``acct:seq``; ARGV
1 cores, 2 GPUs, each with its sign."""
