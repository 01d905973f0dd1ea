-- opencue_sched_backlog: {"shows": ["{show}"]}, {"jobs": ["{job}"]} or {"layers": ["{layer}"]}. What a worker knows of the
-- waiting work of a managed show is not so any more, and is to be read again: just this. A show is named with each of
-- its flags, a job with what decides whether and under which caps it is booked, a layer with what decides where.
-- Caps, job priorities, subscriptions and limits are named as vertices, on opencue_sched_caps.
--
-- Per row, behind a WHEN that is false for nearly every update of these tables. An id takes at most 216 bytes quoted:
-- no payload comes near the 8,000 bytes that PostgreSQL takes. Layers of a job that is not live are named with the job.
CREATE FUNCTION opencue_sched_backlog_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_TABLE_NAME = 'show' THEN
        PERFORM pg_notify('opencue_sched_backlog',
                          json_build_object('shows', json_build_array(NEW.pk_show))::text);
    ELSIF TG_TABLE_NAME IN ('job', 'opencue_sched_quarantine') THEN
        PERFORM pg_notify('opencue_sched_backlog',
                          json_build_object('jobs', json_build_array(job.pk_job))::text)
        FROM job JOIN show ON show.pk_show = job.pk_show AND show.b_scheduler_managed
        WHERE job.pk_job = COALESCE(NEW.pk_job, OLD.pk_job);
    ELSE
        PERFORM pg_notify('opencue_sched_backlog',
                          json_build_object('layers', json_build_array(layer.pk_layer))::text)
        FROM layer
        JOIN job ON job.pk_job = layer.pk_job AND job.str_state = 'PENDING'
        JOIN show ON show.pk_show = job.pk_show AND show.b_scheduler_managed
        WHERE layer.pk_layer = COALESCE(NEW.pk_layer, OLD.pk_layer);
    END IF;
    RETURN NULL;
END
$$;

-- Not one trigger with opencue_sched_show_opened, nor, on job, with opencue_sched_work_arrived: only dropping a trigger
-- changes its WHEN, and that would keep even readers from the table of a farm at work.
CREATE TRIGGER opencue_sched_backlog AFTER UPDATE ON show FOR EACH ROW
    WHEN ((OLD.b_scheduler_managed OR NEW.b_scheduler_managed)
          AND (OLD.b_active, OLD.b_scheduler_managed, OLD.b_booking_enabled, OLD.b_dispatch_enabled, OLD.b_paused)
              IS DISTINCT FROM
              (NEW.b_active, NEW.b_scheduler_managed, NEW.b_booking_enabled, NEW.b_dispatch_enabled, NEW.b_paused))
    EXECUTE FUNCTION opencue_sched_backlog_changed();
CREATE TRIGGER opencue_sched_backlog AFTER UPDATE ON job FOR EACH ROW
    WHEN ((OLD.str_state, OLD.b_paused, OLD.b_auto_book, OLD.pk_folder, OLD.pk_dept, OLD.str_os)
          IS DISTINCT FROM
          (NEW.str_state, NEW.b_paused, NEW.b_auto_book, NEW.pk_folder, NEW.pk_dept, NEW.str_os))
    EXECUTE FUNCTION opencue_sched_backlog_changed();
-- Memory only when it rises: a frame that starts with more than it needs now has enough, and a Cuebot lowers it often.
CREATE TRIGGER opencue_sched_backlog AFTER UPDATE ON layer FOR EACH ROW
    WHEN (NEW.int_mem_min > OLD.int_mem_min
          OR (OLD.int_cores_min, OLD.int_cores_max, OLD.int_gpus_min, OLD.int_gpus_max, OLD.int_gpu_mem_min,
              OLD.int_dispatch_order, OLD.str_tags, OLD.b_threadable)
             IS DISTINCT FROM
             (NEW.int_cores_min, NEW.int_cores_max, NEW.int_gpus_min, NEW.int_gpus_max, NEW.int_gpu_mem_min,
              NEW.int_dispatch_order, NEW.str_tags, NEW.b_threadable))
    EXECUTE FUNCTION opencue_sched_backlog_changed();
CREATE TRIGGER opencue_sched_backlog AFTER INSERT OR DELETE ON layer_limit FOR EACH ROW
    EXECUTE FUNCTION opencue_sched_backlog_changed();
CREATE TRIGGER opencue_sched_backlog AFTER INSERT OR UPDATE OR DELETE ON opencue_sched_quarantine FOR EACH ROW
    EXECUTE FUNCTION opencue_sched_backlog_changed();

-- As before (objects.sql), and a layer that has its first waiting frame, or another start, is named. It is named while its
-- job is paused too, which is no new work: who unpauses the job names that alone. On hot tables: without the function
-- that cuts lists of ids to payloads, for there is one.
CREATE OR REPLACE FUNCTION opencue_sched_work_arrived() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    live record;
BEGIN
    SELECT job.pk_show, job.b_paused INTO live
    FROM job
    JOIN show ON show.pk_show = job.pk_show AND show.b_scheduler_managed
    WHERE job.pk_job = NEW.pk_job AND job.str_state = 'PENDING';
    IF NOT FOUND THEN
        RETURN NULL;
    END IF;
    IF NOT live.b_paused THEN
        PERFORM pg_notify('opencue_sched_work', json_build_object('shows', json_build_array(live.pk_show))::text);
    END IF;
    IF TG_TABLE_NAME <> 'job' THEN
        PERFORM pg_notify('opencue_sched_backlog', json_build_object('layers', json_build_array(NEW.pk_layer))::text);
    END IF;
    RETURN NULL;
END
$$;
