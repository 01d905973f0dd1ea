-- Tables and notifications of this scheduler on an OpenCue database, whoever made it.

-- The highest fence handed out under a name (a leader's, say), so that it never restarts from 1 with an empty Redis.
CREATE TABLE opencue_sched_fence (
    name varchar PRIMARY KEY,
    fence bigint NOT NULL
);

-- Jobs whose rows make a booking fail, left alone until a moment. No foreign key: Cuebot must be able to delete jobs.
CREATE TABLE opencue_sched_quarantine (
    pk_job varchar(36) PRIMARY KEY,
    reason text NOT NULL,
    ts timestamptz NOT NULL DEFAULT now(),
    until timestamptz NOT NULL
);

-- Send {"<field>": [ids]} on a channel in as many notifications as it takes: PostgreSQL refuses a payload of 8,000
-- bytes, and with it the transaction. An id takes at most 216 bytes quoted, so none passes 7,900.
CREATE FUNCTION opencue_sched_notify(channel text, field text, ids text[]) RETURNS void LANGUAGE sql AS $$
    SELECT pg_notify(channel, json_build_object(field, json_agg(id ORDER BY id))::text)
    FROM (
        SELECT id, (sum(octet_length(to_json(id)::text) + 2) OVER (ORDER BY id)) / 7500 AS chunk
        FROM (SELECT DISTINCT unnest(ids) AS id) named
    ) sized
    GROUP BY chunk
$$;

-- opencue_sched_release: {"procs": [...], "hosts": [...]}. Procs that are gone, whoever deleted them, and the hosts
-- they were on. Sent when the deleting transaction commits.
CREATE FUNCTION opencue_sched_proc_released() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('opencue_sched_release',
                      json_build_object('procs', json_agg(pk_proc), 'hosts', json_agg(DISTINCT pk_host))::text)
    FROM (
        SELECT pk_proc, pk_host,
               (sum(octet_length(to_json(pk_proc)::text) + octet_length(to_json(pk_host)::text) + 4)
                OVER (ORDER BY pk_host, pk_proc)) / 7000 AS chunk
        FROM gone
    ) sized
    GROUP BY chunk;
    RETURN NULL;
END
$$;
CREATE TRIGGER opencue_sched_proc_released AFTER DELETE ON proc REFERENCING OLD TABLE AS gone
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_proc_released();

-- opencue_sched_caps: {"vertices": ["sub:{show}:{alloc}", "folder:{id}", "job:{id}", "limit:{id}", ...]} whose caps (or
-- job priority) are not what they were. A transaction that only lifts a cap and puts it back says so beforehand:
-- SET LOCAL opencue_sched.quiet_caps = 'on'.
CREATE FUNCTION opencue_sched_caps_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    changed text[];
BEGIN
    IF current_setting('opencue_sched.quiet_caps', true) = 'on' THEN
        RETURN NULL;
    END IF;
    IF TG_TABLE_NAME = 'subscription' THEN
        IF TG_OP = 'UPDATE' THEN
            SELECT array_agg('sub:' || pk_show || ':' || pk_alloc) INTO changed
            FROM (SELECT pk_show, pk_alloc, int_size, int_burst FROM after
                  EXCEPT SELECT pk_show, pk_alloc, int_size, int_burst FROM before) different;
        ELSIF TG_OP = 'INSERT' THEN
            SELECT array_agg('sub:' || pk_show || ':' || pk_alloc) INTO changed FROM after;
        ELSE
            SELECT array_agg('sub:' || pk_show || ':' || pk_alloc) INTO changed FROM before;
        END IF;
    ELSIF TG_TABLE_NAME = 'folder_resource' THEN
        IF TG_OP = 'UPDATE' THEN
            SELECT array_agg('folder:' || pk_folder) INTO changed
            FROM (SELECT pk_folder, int_min_cores, int_max_cores, int_min_gpus, int_max_gpus FROM after
                  EXCEPT SELECT pk_folder, int_min_cores, int_max_cores, int_min_gpus, int_max_gpus FROM before
                 ) different;
        ELSE
            SELECT array_agg('folder:' || pk_folder) INTO changed FROM after;
        END IF;
    ELSIF TG_TABLE_NAME = 'job_resource' THEN
        IF TG_OP = 'UPDATE' THEN
            SELECT array_agg('job:' || pk_job) INTO changed
            FROM (SELECT pk_job, int_max_cores, int_max_gpus, int_priority FROM after
                  EXCEPT SELECT pk_job, int_max_cores, int_max_gpus, int_priority FROM before) different;
        ELSE
            SELECT array_agg('job:' || pk_job) INTO changed FROM after;
        END IF;
    ELSE
        IF TG_OP = 'UPDATE' THEN
            SELECT array_agg('limit:' || pk_limit_record) INTO changed
            FROM (SELECT pk_limit_record, int_max_value FROM after
                  EXCEPT SELECT pk_limit_record, int_max_value FROM before) different;
        ELSIF TG_OP = 'INSERT' THEN
            SELECT array_agg('limit:' || pk_limit_record) INTO changed FROM after;
        ELSE
            SELECT array_agg('limit:' || pk_limit_record) INTO changed FROM before;
        END IF;
    END IF;
    IF changed IS NOT NULL THEN
        PERFORM opencue_sched_notify('opencue_sched_caps', 'vertices', changed);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER opencue_sched_caps_update AFTER UPDATE ON subscription
    REFERENCING OLD TABLE AS before NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_insert AFTER INSERT ON subscription REFERENCING NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_delete AFTER DELETE ON subscription REFERENCING OLD TABLE AS before
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_update AFTER UPDATE ON folder_resource
    REFERENCING OLD TABLE AS before NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_insert AFTER INSERT ON folder_resource REFERENCING NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_update AFTER UPDATE ON job_resource
    REFERENCING OLD TABLE AS before NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_insert AFTER INSERT ON job_resource REFERENCING NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_update AFTER UPDATE ON limit_record
    REFERENCING OLD TABLE AS before NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_insert AFTER INSERT ON limit_record REFERENCING NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();
CREATE TRIGGER opencue_sched_caps_delete AFTER DELETE ON limit_record REFERENCING OLD TABLE AS before
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_caps_changed();

-- opencue_sched_work: {"shows": ["{show}"]}. A managed show has work it had not: a job went live or was unpaused, or a
-- layer has its first waiting frame. Per row, behind a WHEN that is false for nearly every update of these hot tables;
-- PostgreSQL sends equal notifications of a transaction once.
CREATE FUNCTION opencue_sched_work_arrived() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM opencue_sched_notify('opencue_sched_work', 'shows', ARRAY[show.pk_show::text])
    FROM job
    JOIN show ON show.pk_show = job.pk_show AND show.b_scheduler_managed
    WHERE job.pk_job = NEW.pk_job AND job.str_state = 'PENDING' AND NOT job.b_paused;
    RETURN NULL;
END
$$;
CREATE TRIGGER opencue_sched_work_arrived AFTER UPDATE ON job FOR EACH ROW
    WHEN (NEW.str_state = 'PENDING' AND NOT NEW.b_paused AND (OLD.str_state <> 'PENDING' OR OLD.b_paused))
    EXECUTE FUNCTION opencue_sched_work_arrived();
CREATE TRIGGER opencue_sched_work_arrived AFTER UPDATE ON layer_stat FOR EACH ROW
    WHEN (OLD.int_waiting_count <= 0 AND NEW.int_waiting_count > 0)
    EXECUTE FUNCTION opencue_sched_work_arrived();
