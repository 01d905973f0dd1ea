-- What follows from a change of a frame's state.
--
-- BEFORE triggers fire in the order of their names, each seeing the row as the previous one left it. Code that changes
-- a frame must read its state and version back: these may have changed both again.

CREATE FUNCTION trigger__set_frame_ts_eligible_on_insert() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.ts_eligible := now();
    RETURN NEW;
END
$$;
CREATE TRIGGER set_frame_ts_eligible_on_insert BEFORE INSERT ON frame FOR EACH ROW
    WHEN (NEW.str_state = 'WAITING' AND NEW.ts_eligible IS NULL)
    EXECUTE FUNCTION trigger__set_frame_ts_eligible_on_insert();

CREATE FUNCTION trigger__set_frame_ts_eligible_setup_to_wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.ts_eligible := now();
    RETURN NEW;
END
$$;
CREATE TRIGGER set_frame_ts_eligible_setup_to_wait BEFORE UPDATE ON frame FOR EACH ROW
    WHEN (OLD.str_state = 'SETUP' AND NEW.str_state = 'WAITING')
    EXECUTE FUNCTION trigger__set_frame_ts_eligible_setup_to_wait();

-- A checkpointing frame that goes back to the queue waits as CHECKPOINT.
CREATE FUNCTION trigger__update_frame_checkpoint_state() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.str_state := 'CHECKPOINT';
    RETURN NEW;
END
$$;
CREATE TRIGGER update_frame_checkpoint_state BEFORE UPDATE ON frame FOR EACH ROW
    WHEN (OLD.str_state = 'RUNNING' AND NEW.str_state = 'WAITING'
          AND NEW.str_checkpoint_state IN ('ENABLED', 'COPYING'))
    EXECUTE FUNCTION trigger__update_frame_checkpoint_state();

-- The last dependency was satisfied.
CREATE FUNCTION trigger__update_frame_dep_to_wait() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.str_state := 'WAITING';
    NEW.ts_updated := now();
    NEW.ts_eligible := now();
    NEW.int_version := NEW.int_version + 1;
    RETURN NEW;
END
$$;
CREATE TRIGGER update_frame_dep_to_wait BEFORE UPDATE ON frame FOR EACH ROW
    WHEN (OLD.int_depend_count > 0 AND NEW.int_depend_count < 1 AND OLD.str_state = 'DEPEND')
    EXECUTE FUNCTION trigger__update_frame_dep_to_wait();

-- A frame that succeeded cannot be eaten.
CREATE FUNCTION trigger__update_frame_eaten() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.str_state := 'SUCCEEDED';
    RETURN NEW;
END
$$;
CREATE TRIGGER update_frame_eaten BEFORE UPDATE ON frame FOR EACH ROW
    WHEN (OLD.str_state = 'SUCCEEDED' AND NEW.str_state = 'EATEN') EXECUTE FUNCTION trigger__update_frame_eaten();

-- A frame with open dependencies does not wait or end, it depends.
CREATE FUNCTION trigger__update_frame_wait_to_dep() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.str_state := 'DEPEND';
    NEW.ts_updated := now();
    NEW.int_version := NEW.int_version + 1;
    RETURN NEW;
END
$$;
CREATE TRIGGER update_frame_wait_to_dep BEFORE UPDATE ON frame FOR EACH ROW
    WHEN (NEW.int_depend_count > 0 AND NEW.str_state IN ('DEAD', 'SUCCEEDED', 'WAITING', 'CHECKPOINT'))
    EXECUTE FUNCTION trigger__update_frame_wait_to_dep();

-- The two AFTER triggers run once a statement. Old and new rows meet by grouping on the id, and other tables are
-- reached by their keys: the plan of a join would be made for the first statement of a session, often of one frame, and
-- kept for thousands. Most updates are reports of what runs, and change no state: they have nothing aggregated.

-- Frames counted by state, per layer and per job. Frames that leave SETUP are not counted: whoever activates a job
-- writes the first counts. All layer_stat rows come first, then all job_stat rows, each in id order, so that two
-- statements over the same jobs wait for each other instead of deadlocking.
CREATE FUNCTION trigger__update_frame_status_counts() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    d RECORD;
BEGIN
    IF NOT EXISTS (SELECT FROM after WHERE str_state <> 'RUNNING')
        AND NOT EXISTS (SELECT FROM before WHERE str_state <> 'RUNNING') THEN
        RETURN NULL;
    END IF;
    FOR d IN
        WITH change AS (
            SELECT max(pk_layer) AS pk_layer, max(pk_job) AS pk_job, max(was) AS was, max(state) AS state,
                   max(ts_started) AS ts_started, max(ts_stopped) AS ts_stopped
            FROM (
                SELECT pk_frame, str_state AS was, NULL AS state, NULL AS pk_layer, NULL AS pk_job,
                       NULL::timestamptz AS ts_started, NULL::timestamptz AS ts_stopped
                FROM before
                UNION ALL
                SELECT pk_frame, NULL, str_state, pk_layer, pk_job, ts_started, ts_stopped
                FROM after
            ) sides
            GROUP BY pk_frame
            HAVING max(was) <> max(state) AND max(was) <> 'SETUP'
        )
        SELECT pk_job, pk_layer,
               count(*) FILTER (WHERE state = 'WAITING') - count(*) FILTER (WHERE was = 'WAITING') AS waiting,
               count(*) FILTER (WHERE state = 'RUNNING') - count(*) FILTER (WHERE was = 'RUNNING') AS running,
               count(*) FILTER (WHERE state = 'DEAD') - count(*) FILTER (WHERE was = 'DEAD') AS dead,
               count(*) FILTER (WHERE state = 'DEPEND') - count(*) FILTER (WHERE was = 'DEPEND') AS depend,
               count(*) FILTER (WHERE state = 'EATEN') - count(*) FILTER (WHERE was = 'EATEN') AS eaten,
               count(*) FILTER (WHERE state = 'SUCCEEDED') - count(*) FILTER (WHERE was = 'SUCCEEDED') AS succeeded,
               count(*) FILTER (WHERE state = 'CHECKPOINT') - count(*) FILTER (WHERE was = 'CHECKPOINT') AS checkpoint,
               min(coalesce(ts_started, now())) FILTER (WHERE state = 'RUNNING') AS first_started,
               max(coalesce(ts_stopped, now())) FILTER (WHERE was = 'RUNNING') AS last_stopped
        FROM change
        GROUP BY GROUPING SETS ((pk_job, pk_layer), (pk_job))
        ORDER BY grouping(pk_layer), pk_layer, pk_job
    LOOP
        IF d.pk_layer IS NOT NULL THEN
            UPDATE layer_stat
            SET int_waiting_count = int_waiting_count + d.waiting,
                int_running_count = int_running_count + d.running,
                int_dead_count = int_dead_count + d.dead,
                int_depend_count = int_depend_count + d.depend,
                int_eaten_count = int_eaten_count + d.eaten,
                int_succeeded_count = int_succeeded_count + d.succeeded,
                int_checkpoint_count = int_checkpoint_count + d.checkpoint,
                ts_started = CASE WHEN d.first_started IS NULL THEN ts_started
                                  ELSE coalesce(ts_started, d.first_started) END,
                ts_stopped = coalesce(d.last_stopped, ts_stopped)
            WHERE pk_layer = d.pk_layer;
        ELSE
            UPDATE job_stat
            SET int_waiting_count = int_waiting_count + d.waiting,
                int_running_count = int_running_count + d.running,
                int_dead_count = int_dead_count + d.dead,
                int_depend_count = int_depend_count + d.depend,
                int_eaten_count = int_eaten_count + d.eaten,
                int_succeeded_count = int_succeeded_count + d.succeeded,
                int_checkpoint_count = int_checkpoint_count + d.checkpoint
            WHERE pk_job = d.pk_job;
        END IF;
    END LOOP;
    RETURN NULL;
END
$$;
CREATE TRIGGER update_frame_status_counts AFTER UPDATE ON frame
    REFERENCING OLD TABLE AS before NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION trigger__update_frame_status_counts();

-- One history row per run: opened on entering RUNNING, closed on leaving it, deleted when the run was taken back before
-- it began (exit status 299). Values wider than their history column are cut to it, and a layer without history (made
-- while it was off) gets none: history must not make a completion fail.
-- The open run is looked up by its frame: a sum keeps the condition on it from the index of int_ts_stopped, by which
-- every running frame was read for each that ended. Each statement is planned for what is there when it is run, and
-- looks up row by row: a plan that is kept was made while tables were small.
CREATE FUNCTION trigger__frame_history_open() RETURNS trigger LANGUAGE plpgsql
    SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
    SET plan_cache_mode = force_custom_plan AS $$
DECLARE
    started boolean := EXISTS (SELECT FROM after WHERE str_state = 'RUNNING')
                       AND EXISTS (SELECT FROM before WHERE str_state <> 'RUNNING');
    ended boolean := EXISTS (SELECT FROM before WHERE str_state = 'RUNNING')
                     AND EXISTS (SELECT FROM after WHERE str_state <> 'RUNNING');
BEGIN
    IF NOT (started OR ended) OR EXISTS (SELECT FROM config WHERE str_key = 'DISABLE_HISTORY') THEN
        RETURN NULL;
    END IF;
    IF started THEN
        INSERT INTO frame_history
            (pk_frame, pk_layer, pk_job, str_name, str_state, int_cores, int_mem_reserved, int_gpus,
             int_gpu_mem_reserved, str_host, int_ts_started, pk_alloc)
        SELECT run.pk_frame, run.pk_layer, run.pk_job, run.str_name, 'RUNNING', run.int_cores,
               run.int_mem_reserved, run.int_gpus, run.int_gpu_mem_reserved, left(run.str_host, 64), epoch(now()),
               (SELECT pk_alloc FROM host WHERE str_name = run.str_host)
        FROM (
            SELECT pk_frame, max(pk_layer) AS pk_layer, max(pk_job) AS pk_job, max(str_name) AS str_name,
                   max(str_host) AS str_host, max(int_cores) AS int_cores, max(int_mem_reserved) AS int_mem_reserved,
                   max(int_gpus) AS int_gpus, max(int_gpu_mem_reserved) AS int_gpu_mem_reserved
            FROM (
                SELECT pk_frame, NULL AS pk_layer, NULL AS pk_job, NULL AS str_name, NULL AS str_host,
                       NULL::integer AS int_cores, NULL::bigint AS int_mem_reserved, NULL::integer AS int_gpus,
                       NULL::bigint AS int_gpu_mem_reserved
                FROM before WHERE str_state <> 'RUNNING'
                UNION ALL
                SELECT pk_frame, pk_layer, pk_job, str_name, str_host, int_cores, int_mem_reserved, int_gpus,
                       int_gpu_mem_reserved
                FROM after WHERE str_state = 'RUNNING'
            ) sides
            GROUP BY pk_frame
            HAVING count(*) = 2
        ) run
        JOIN layer_history ON layer_history.pk_layer = run.pk_layer
        ORDER BY run.pk_frame;
    END IF;
    IF ended THEN
        IF EXISTS (SELECT FROM after WHERE str_state <> 'RUNNING' AND int_exit_status = 299) THEN
            DELETE FROM frame_history
            USING (
                SELECT pk_frame
                FROM (
                    SELECT pk_frame FROM before WHERE str_state = 'RUNNING'
                    UNION ALL
                    SELECT pk_frame FROM after WHERE str_state <> 'RUNNING' AND int_exit_status = 299
                ) sides
                GROUP BY pk_frame
                HAVING count(*) = 2
            ) run
            WHERE frame_history.pk_frame = run.pk_frame AND int_ts_stopped + 0 = 0;
        END IF;
        UPDATE frame_history
        SET int_mem_max_used = run.int_mem_max_used,
            int_gpu_mem_max_used = run.int_gpu_mem_max_used,
            int_ts_stopped = epoch(now()),
            int_exit_status = least(greatest(run.int_exit_status, -32768), 32767),
            int_checkpoint_count = CASE WHEN run.state = 'CHECKPOINT' THEN 1 ELSE 0 END
        FROM (
            SELECT pk_frame, max(state) AS state, max(int_exit_status) AS int_exit_status,
                   max(int_mem_max_used) AS int_mem_max_used, max(int_gpu_mem_max_used) AS int_gpu_mem_max_used
            FROM (
                SELECT pk_frame, NULL AS state, NULL::bigint AS int_exit_status, NULL::bigint AS int_mem_max_used,
                       NULL::bigint AS int_gpu_mem_max_used
                FROM before WHERE str_state = 'RUNNING'
                UNION ALL
                SELECT pk_frame, str_state, int_exit_status, int_mem_max_used, int_gpu_mem_max_used
                FROM after WHERE str_state <> 'RUNNING' AND int_exit_status IS DISTINCT FROM 299
            ) sides
            GROUP BY pk_frame
            HAVING count(*) = 2
        ) run
        WHERE frame_history.pk_frame = run.pk_frame AND int_ts_stopped + 0 = 0;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER frame_history_open AFTER UPDATE ON frame
    REFERENCING OLD TABLE AS before NEW TABLE AS after
    FOR EACH STATEMENT EXECUTE FUNCTION trigger__frame_history_open();
