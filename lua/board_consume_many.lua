-- board_consume_many: be done with many jobs at a time.
-- ARGV[2] owner   ARGV[3] token   ARGV[4..] uuids
-- Returns how many of these the owner had by this token; they are gone.
-- Invariant: nobody else's job goes; one whose claim ran out goes too, as long as nobody has taken it since.
--@include board
local uuids, jobs = {}, {}
for i = 4, #ARGV do
  local read = fields_now(ARGV[i], 'state', 'owner', 'claim')
  if read[3] == ARGV[3] and (read[1] == 'ready' or (read[1] == 'claimed' and read[2] == ARGV[2])) then
    uuids[#uuids + 1], jobs[#jobs + 1] = ARGV[i], PREFIX .. ARGV[i]
  end
end
if #uuids > 0 then
  -- As forget() does for one, with one command for all on each index.
  redis.call('DEL', unpack(jobs))
  remove_from({LISTED, CLAIMED, READY, AWAITED}, unpack(uuids))
end
return #uuids
