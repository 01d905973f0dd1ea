-- The least a farm needs before its first show: a facility, a department, an allocation that new hosts join by the tag
-- "general", the service "default" that layers name when they name none, and Cuebot's maintenance locks.

INSERT INTO facility (pk_facility, str_name, b_default) VALUES (gen_random_uuid()::text, 'local', true);

INSERT INTO dept (pk_dept, str_name, b_default) VALUES (gen_random_uuid()::text, 'Unknown', true);

INSERT INTO alloc (pk_alloc, str_name, str_tag, b_allow_edit, b_default, pk_facility)
SELECT gen_random_uuid()::text, 'local.general', 'general', false, true, pk_facility FROM facility;

INSERT INTO service (pk_service, str_name, b_threadable, int_cores_min, int_mem_min, str_tags)
VALUES (gen_random_uuid()::text, 'default', false, 100, 3355443, 'general');

INSERT INTO config (pk_config, str_key, int_value) VALUES (gen_random_uuid()::text, 'MAX_FRAME_RETRIES', 16);

INSERT INTO history_period DEFAULT VALUES;

INSERT INTO task_lock (pk_task_lock, str_name, int_timeout)
SELECT '00000000-0000-0000-0000-' || lpad(n::text, 12, '0'), str_name, timeout
FROM (VALUES (1, 'LOCK_HISTORICAL_TRANSFER', 3600),
             (2, 'LOCK_HARDWARE_STATE_CHECK', 30),
             (3, 'LOCK_ORPHANED_PROC_CHECK', 30),
             (5, 'LOCK_TASK_UPDATE', 3600),
             (6, 'LOCK_SUBSCRIPTION_RECALCULATION', 7200),
             (7, 'LOCK_STUCK_DEPENDENCY_RECOVERY', 600),
             (8, 'LOCK_ORPHANED_FRAME_CHECK', 300000)) AS locks (n, str_name, timeout);
