-- Takes back objects.sql. Dropping a function takes the triggers that call it along.

DROP FUNCTION opencue_sched_proc_released() CASCADE;
DROP FUNCTION opencue_sched_caps_changed() CASCADE;
DROP FUNCTION opencue_sched_work_arrived() CASCADE;
DROP FUNCTION opencue_sched_notify(text, text, text[]);
DROP TABLE IF EXISTS opencue_sched_quarantine;
DROP TABLE IF EXISTS opencue_sched_fence;
