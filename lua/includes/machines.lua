-- The machines of limits that count machines. Such a limit L counts its frames at acct:limit:L as any other, those of them
-- whose machine is known at acct:limit:L@ too, and those on machine M at acct:limit:L@M: an entry lists all three. The set
-- acct:machines:L has each M that has such frames. Needs includes/ledger.

-- Add frames to a counter of a limit; a machine comes with its first frame and goes with its last. A set that another
-- program made something else does not end a script in the midst of its work: nothing is booked by it until a recompute
-- has made it anew.
local function add_frames(key, more)
  local sum = add(key, 'int_running', more)
  local limit, machine = string.match(key, '^acct:limit:([^@]*)@(.+)$')
  if not limit then return end
  if type(sum) == 'table' or sum > 0 then
    try('SADD', 'acct:machines:' .. limit, machine)
  else
    try('SREM', 'acct:machines:' .. limit, machine)
    if sum == 0 then call('UNLINK', key) end
  end
end
