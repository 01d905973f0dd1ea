"""One cluster pass: follow, plan, book, commit, launch, settle.

Composes what other packages have: what waits and which hosts there are (feeds that keep both in memory), plans
(placement/), bookings (accounting/), the transaction (store/) and RQDs (rqd/). Also the sweep that finds clusters with
work, reserved hosts for wide frames, cooldowns and the verdicts that passes leave. What comes back from hosts is in
reports/; Celery's part is in worker/ and tasks/.
"""
