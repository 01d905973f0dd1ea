-- Rows that come and go with a job and its layers, and what a job takes along when it moves or ends.

-- Copy what a job did into its history row, if it has one (jobs made while history was off have none).
CREATE FUNCTION history__record_job(job_id varchar, archived boolean) RETURNS void LANGUAGE sql AS $$
    UPDATE job_history h
    SET pk_dept = j.pk_dept,
        int_core_time_success = u.int_core_time_success,
        int_core_time_fail = u.int_core_time_fail,
        int_gpu_time_success = u.int_gpu_time_success,
        int_gpu_time_fail = u.int_gpu_time_fail,
        int_frame_count = j.int_frame_count,
        int_layer_count = j.int_layer_count,
        int_waiting_count = s.int_waiting_count,
        int_dead_count = s.int_dead_count,
        int_depend_count = s.int_depend_count,
        int_eaten_count = s.int_eaten_count,
        int_succeeded_count = s.int_succeeded_count,
        int_running_count = s.int_running_count,
        int_max_rss = m.int_max_rss,
        int_gpu_mem_max = m.int_gpu_mem_max,
        int_ts_stopped = epoch(coalesce(j.ts_stopped, now())),
        b_archived = h.b_archived OR archived
    FROM job j
    JOIN job_usage u ON u.pk_job = j.pk_job
    JOIN job_stat s ON s.pk_job = j.pk_job
    JOIN job_mem m ON m.pk_job = j.pk_job
    WHERE j.pk_job = job_id AND h.pk_job = job_id
$$;

CREATE FUNCTION history__record_layers(layer_ids varchar[], archived boolean) RETURNS void LANGUAGE sql AS $$
    UPDATE layer_history h
    SET int_cores_min = l.int_cores_min,
        int_mem_min = l.int_mem_min,
        int_core_time_success = u.int_core_time_success,
        int_core_time_fail = u.int_core_time_fail,
        int_gpu_time_success = u.int_gpu_time_success,
        int_gpu_time_fail = u.int_gpu_time_fail,
        int_frame_count = s.int_total_count,
        int_waiting_count = s.int_waiting_count,
        int_dead_count = s.int_dead_count,
        int_depend_count = s.int_depend_count,
        int_eaten_count = s.int_eaten_count,
        int_succeeded_count = s.int_succeeded_count,
        int_running_count = s.int_running_count,
        int_max_rss = m.int_max_rss,
        int_gpu_mem_max = m.int_gpu_mem_max,
        b_archived = h.b_archived OR archived
    FROM layer l
    JOIN layer_usage u ON u.pk_layer = l.pk_layer
    JOIN layer_stat s ON s.pk_layer = l.pk_layer
    JOIN layer_mem m ON m.pk_layer = l.pk_layer
    WHERE l.pk_layer = ANY (layer_ids) AND h.pk_layer = l.pk_layer
$$;

CREATE FUNCTION trigger__after_insert_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO job_stat (pk_job_stat, pk_job) VALUES (NEW.pk_job, NEW.pk_job);
    INSERT INTO job_resource (pk_job_resource, pk_job) VALUES (NEW.pk_job, NEW.pk_job);
    INSERT INTO job_usage (pk_job_usage, pk_job) VALUES (NEW.pk_job, NEW.pk_job);
    INSERT INTO job_mem (pk_job_mem, pk_job) VALUES (NEW.pk_job, NEW.pk_job);
    IF NOT EXISTS (SELECT FROM config WHERE str_key = 'DISABLE_HISTORY') THEN
        INSERT INTO job_history
            (pk_job, pk_show, pk_facility, pk_dept, str_name, str_shot, str_user, int_ts_started)
        VALUES
            (NEW.pk_job, NEW.pk_show, NEW.pk_facility, NEW.pk_dept, NEW.str_name, NEW.str_shot, NEW.str_user,
             epoch(now()));
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER after_insert_job AFTER INSERT ON job FOR EACH ROW EXECUTE FUNCTION trigger__after_insert_job();

-- A layer of a job without a history row gets none either: the key may have been removed in between.
CREATE FUNCTION trigger__after_insert_layer() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO layer_stat (pk_layer_stat, pk_layer, pk_job) VALUES (NEW.pk_layer, NEW.pk_layer, NEW.pk_job);
    INSERT INTO layer_resource (pk_layer_resource, pk_layer, pk_job) VALUES (NEW.pk_layer, NEW.pk_layer, NEW.pk_job);
    INSERT INTO layer_usage (pk_layer_usage, pk_layer, pk_job) VALUES (NEW.pk_layer, NEW.pk_layer, NEW.pk_job);
    INSERT INTO layer_mem (pk_layer_mem, pk_layer, pk_job) VALUES (NEW.pk_layer, NEW.pk_layer, NEW.pk_job);
    IF NOT EXISTS (SELECT FROM config WHERE str_key = 'DISABLE_HISTORY') THEN
        INSERT INTO layer_history
            (pk_layer, pk_job, str_name, str_type, int_cores_min, int_mem_min, int_gpus_min, int_gpu_mem_min,
             str_services)
        SELECT NEW.pk_layer, pk_job, NEW.str_name, NEW.str_type, NEW.int_cores_min, NEW.int_mem_min,
               NEW.int_gpus_min, NEW.int_gpu_mem_min, NEW.str_services
        FROM job_history
        WHERE pk_job = NEW.pk_job;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER after_insert_layer AFTER INSERT ON layer FOR EACH ROW EXECUTE FUNCTION trigger__after_insert_layer();

CREATE FUNCTION trigger__after_job_finished() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM history__record_job(NEW.pk_job, false);
    PERFORM history__record_layers(ARRAY(SELECT pk_layer FROM layer WHERE pk_job = NEW.pk_job), false);
    DELETE FROM job_local WHERE pk_job = NEW.pk_job;
    RETURN NULL;
END
$$;
CREATE TRIGGER after_job_finished AFTER UPDATE ON job FOR EACH ROW
    WHEN (OLD.str_state = 'PENDING' AND NEW.str_state = 'FINISHED') EXECUTE FUNCTION trigger__after_job_finished();

-- A job takes its use along to the folder it moves to. Both rows are locked in id order.
CREATE FUNCTION trigger__after_job_moved() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    used RECORD;
BEGIN
    SELECT int_cores, int_gpus INTO used FROM job_resource WHERE pk_job = NEW.pk_job;
    IF used.int_cores > 0 OR used.int_gpus > 0 THEN
        PERFORM 1 FROM folder_resource WHERE pk_folder IN (OLD.pk_folder, NEW.pk_folder)
        ORDER BY pk_folder FOR NO KEY UPDATE;
        UPDATE folder_resource SET int_cores = int_cores + used.int_cores, int_gpus = int_gpus + used.int_gpus
        WHERE pk_folder = NEW.pk_folder;
        UPDATE folder_resource SET int_cores = int_cores - used.int_cores, int_gpus = int_gpus - used.int_gpus
        WHERE pk_folder = OLD.pk_folder;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER after_job_moved AFTER UPDATE ON job FOR EACH ROW
    WHEN (NEW.pk_folder <> OLD.pk_folder) EXECUTE FUNCTION trigger__after_job_moved();

-- And to the department.
CREATE FUNCTION trigger__after_job_dept_update() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    used RECORD;
BEGIN
    SELECT int_cores, int_gpus INTO used FROM job_resource WHERE pk_job = NEW.pk_job;
    IF used.int_cores > 0 OR used.int_gpus > 0 THEN
        PERFORM 1 FROM point WHERE pk_show IN (OLD.pk_show, NEW.pk_show) AND pk_dept IN (OLD.pk_dept, NEW.pk_dept)
        ORDER BY pk_point FOR NO KEY UPDATE;
        UPDATE point SET int_cores = int_cores + used.int_cores, int_gpus = int_gpus + used.int_gpus
        WHERE pk_show = NEW.pk_show AND pk_dept = NEW.pk_dept;
        UPDATE point SET int_cores = int_cores - used.int_cores, int_gpus = int_gpus - used.int_gpus
        WHERE pk_show = OLD.pk_show AND pk_dept = OLD.pk_dept;
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER after_job_dept_update AFTER UPDATE ON job FOR EACH ROW
    WHEN (NEW.pk_dept <> OLD.pk_dept AND NEW.str_state = 'PENDING') EXECUTE FUNCTION trigger__after_job_dept_update();

CREATE FUNCTION trigger__before_delete_layer() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM history__record_layers(ARRAY[OLD.pk_layer], true);
    DELETE FROM layer_env WHERE pk_layer = OLD.pk_layer;
    DELETE FROM layer_output WHERE pk_layer = OLD.pk_layer;
    DELETE FROM layer_mem WHERE pk_layer = OLD.pk_layer;
    DELETE FROM layer_usage WHERE pk_layer = OLD.pk_layer;
    DELETE FROM layer_resource WHERE pk_layer = OLD.pk_layer;
    DELETE FROM layer_stat WHERE pk_layer = OLD.pk_layer;
    RETURN OLD;
END
$$;
CREATE TRIGGER before_delete_layer BEFORE DELETE ON layer FOR EACH ROW
    EXECUTE FUNCTION trigger__before_delete_layer();

CREATE FUNCTION trigger__before_delete_layer_drop_limit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM layer_limit WHERE pk_layer = OLD.pk_layer;
    RETURN OLD;
END
$$;
CREATE TRIGGER before_delete_layer_drop_limit BEFORE DELETE ON layer FOR EACH ROW
    EXECUTE FUNCTION trigger__before_delete_layer_drop_limit();

-- A job that still has procs cannot be deleted: the foreign key of proc refuses it.
CREATE FUNCTION trigger__before_delete_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT EXISTS (SELECT FROM config WHERE str_key = 'DISABLE_HISTORY') THEN
        PERFORM history__record_job(OLD.pk_job, true);
    END IF;
    DELETE FROM depend WHERE pk_job_depend_on = OLD.pk_job OR pk_job_depend_er = OLD.pk_job;
    DELETE FROM frame_state_display_overrides o USING frame f WHERE f.pk_job = OLD.pk_job AND o.pk_frame = f.pk_frame;
    DELETE FROM frame WHERE pk_job = OLD.pk_job;
    DELETE FROM layer WHERE pk_job = OLD.pk_job;
    DELETE FROM job_env WHERE pk_job = OLD.pk_job;
    DELETE FROM job_post WHERE pk_job = OLD.pk_job;
    DELETE FROM job_local WHERE pk_job = OLD.pk_job;
    DELETE FROM host_local WHERE pk_job = OLD.pk_job;
    DELETE FROM comments WHERE pk_job = OLD.pk_job;
    DELETE FROM job_mem WHERE pk_job = OLD.pk_job;
    DELETE FROM job_usage WHERE pk_job = OLD.pk_job;
    DELETE FROM job_resource WHERE pk_job = OLD.pk_job;
    DELETE FROM job_stat WHERE pk_job = OLD.pk_job;
    RETURN OLD;
END
$$;
CREATE TRIGGER before_delete_job BEFORE DELETE ON job FOR EACH ROW EXECUTE FUNCTION trigger__before_delete_job();

CREATE FUNCTION trigger__before_delete_host() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM host_stat WHERE pk_host = OLD.pk_host;
    DELETE FROM host_tag WHERE pk_host = OLD.pk_host;
    DELETE FROM deed WHERE pk_host = OLD.pk_host;
    RETURN OLD;
END
$$;
CREATE TRIGGER before_delete_host BEFORE DELETE ON host FOR EACH ROW EXECUTE FUNCTION trigger__before_delete_host();
