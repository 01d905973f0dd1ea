-- audit_begin: begin to log every change of an entry, for a consistency check.
-- KEYS    1 acct:seq, 2 acct:ledger, 3 acct:epoch, 4 acct:audit
-- ARGV    1 epoch, 2 token, 3 life in ms
-- Returns {1, 1}; {1, 0} when another consistency check is under way; or {0, 'not_ready', stored epoch, '0'}.
-- Invariants: in one step the log is empty and begins, so that nobody else's log is ever emptied.
--@include ledger
if not call('SET', AUDIT, ARGV[2], 'NX', 'PX', ARGV[3]) then
  return {1, 0}
end
call('UNLINK', AUDIT_LOG)
return {1, 1}
