-- Wait until no commit of bookings is under way that has read the caps of these vertices, and keep others from it: a cap
-- changes between commits. Whoever commits bookings shares both kinds of locks (store/booking.py): one for each vertex,
-- which is what a person's change takes; and 1,024 for all of a table, for a statement may change the caps of all jobs,
-- and the server's table of locks is small. A statement takes its locks in one order, as another like it does. Nobody
-- books frames of a job that is not pending, and launching one may take long.
CREATE FUNCTION opencue_sched_settle_caps(vertices text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    booked text[];
BEGIN
    SELECT array_agg(DISTINCT name) INTO booked FROM unnest(vertices) AS name
    WHERE name NOT LIKE 'job:%' OR EXISTS (SELECT FROM job WHERE pk_job = substr(name, 5) AND str_state = 'PENDING');
    IF cardinality(booked) <= 64 THEN
        PERFORM pg_advisory_xact_lock(vertex)
        FROM (SELECT hashtextextended('opencue_sched_caps:' || name, 0) AS vertex FROM unnest(booked) AS name
              ORDER BY 1) locks;
    ELSE
        PERFORM pg_advisory_xact_lock(kind, slot)
        FROM (SELECT DISTINCT hashtext('opencue_sched_caps:' || split_part(name, ':', 1)) AS kind,
                              hashtext(name) & 1023 AS slot
              FROM unnest(booked) AS name ORDER BY 1, 2) locks;
    END IF;
END
$$;

-- As before (objects.sql), and with that wait. A transaction that only lifts a cap and puts it back leaves nothing to wait
-- for, and says so: SET LOCAL opencue_sched.lifts_caps = 'on'.
CREATE OR REPLACE FUNCTION opencue_sched_caps_changed() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    quiet boolean := current_setting('opencue_sched.quiet_caps', true) IS NOT DISTINCT FROM 'on';
    lifts boolean := current_setting('opencue_sched.lifts_caps', true) IS NOT DISTINCT FROM 'on';
    changed text[];
BEGIN
    IF quiet AND lifts THEN
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
    IF changed IS NOT NULL AND NOT lifts
       AND (TG_OP = 'UPDATE' OR TG_OP = 'DELETE' AND TG_TABLE_NAME = 'subscription') THEN
        PERFORM opencue_sched_settle_caps(changed);
    END IF;
    IF changed IS NOT NULL AND NOT quiet THEN
        PERFORM opencue_sched_notify('opencue_sched_caps', 'vertices', changed);
    END IF;
    RETURN NULL;
END
$$;
