-- What Cuebot and its tools read as views. Column names, order and types are part of the contract.

-- Shows with work: a live job with waiting frames and at least a core left below its maximum.
-- A maximum of 0 or -1 hides the job here although it means "no cap": this scheduler's own queries do not use the view.
CREATE VIEW vs_waiting AS
SELECT DISTINCT j.pk_show
FROM job j
JOIN job_stat s ON s.pk_job = j.pk_job AND s.int_waiting_count <> 0
JOIN job_resource r ON r.pk_job = j.pk_job AND r.int_max_cores - r.int_cores >= 100
WHERE j.str_state = 'PENDING' AND NOT j.b_paused;

CREATE VIEW vs_show_stat AS
SELECT j.pk_show,
       sum(s.int_waiting_count + s.int_depend_count) AS int_pending_count,
       sum(s.int_running_count) AS int_running_count,
       sum(s.int_dead_count) AS int_dead_count,
       count(*) AS int_job_count
FROM job j
JOIN job_stat s ON s.pk_job = j.pk_job
WHERE j.str_state = 'PENDING'
GROUP BY j.pk_show;

CREATE VIEW vs_show_resource AS
SELECT j.pk_show, sum(r.int_cores) AS int_cores, sum(r.int_gpus) AS int_gpus
FROM job j
JOIN job_resource r ON r.pk_job = j.pk_job
WHERE j.str_state = 'PENDING'
GROUP BY j.pk_show;

-- Live use per job, from the procs themselves.
CREATE VIEW vs_job_resource AS
SELECT j.pk_job,
       count(p.pk_proc) AS int_procs,
       coalesce(sum(p.int_cores_reserved), 0) AS int_cores,
       coalesce(sum(p.int_gpus_reserved), 0) AS int_gpus,
       coalesce(sum(p.int_mem_reserved), 0) AS int_mem_reserved
FROM job j
LEFT JOIN proc p ON p.pk_job = j.pk_job
GROUP BY j.pk_job;

CREATE VIEW vs_folder_counts AS
SELECT f.pk_folder,
       coalesce(sum(s.int_depend_count), 0) AS int_depend_count,
       coalesce(sum(s.int_waiting_count), 0) AS int_waiting_count,
       coalesce(sum(s.int_running_count), 0) AS int_running_count,
       coalesce(sum(s.int_dead_count), 0) AS int_dead_count,
       coalesce(sum(r.int_cores), 0) AS int_cores,
       coalesce(sum(r.int_gpus), 0) AS int_gpus,
       count(j.pk_job) AS int_job_count
FROM folder f
LEFT JOIN job j ON j.pk_folder = f.pk_folder AND j.str_state = 'PENDING'
LEFT JOIN job_stat s ON s.pk_job = j.pk_job
LEFT JOIN job_resource r ON r.pk_job = j.pk_job
GROUP BY f.pk_folder;

-- Available is what an open host that is up has idle; locked counts whole hosts.
CREATE VIEW vs_alloc_usage AS
SELECT a.pk_alloc,
       coalesce(sum(h.int_cores), 0) AS int_cores,
       coalesce(sum(h.int_cores_idle), 0) AS int_idle_cores,
       coalesce(sum(h.int_cores - h.int_cores_idle), 0) AS int_running_cores,
       coalesce(sum(h.int_cores) FILTER (WHERE h.str_lock_state IN ('LOCKED', 'NIMBY_LOCKED')), 0) AS int_locked_cores,
       coalesce(sum(h.int_cores_idle) FILTER (WHERE h.str_lock_state = 'OPEN' AND s.str_state = 'UP'), 0)
           AS int_available_cores,
       coalesce(sum(h.int_gpus), 0) AS int_gpus,
       coalesce(sum(h.int_gpus_idle), 0) AS int_idle_gpus,
       coalesce(sum(h.int_gpus - h.int_gpus_idle), 0) AS int_running_gpus,
       coalesce(sum(h.int_gpus) FILTER (WHERE h.str_lock_state IN ('LOCKED', 'NIMBY_LOCKED')), 0) AS int_locked_gpus,
       coalesce(sum(h.int_gpus_idle) FILTER (WHERE h.str_lock_state = 'OPEN' AND s.str_state = 'UP'), 0)
           AS int_available_gpus,
       count(h.pk_host) AS int_hosts,
       count(h.pk_host) FILTER (WHERE h.str_lock_state = 'LOCKED') AS int_locked_hosts,
       count(h.pk_host) FILTER (WHERE s.str_state = 'DOWN') AS int_down_hosts
FROM alloc a
LEFT JOIN host h ON h.pk_alloc = a.pk_alloc
LEFT JOIN host_stat s ON s.pk_host = h.pk_host
GROUP BY a.pk_alloc;

-- History inside the span of history_period. Read by accounting departments.
CREATE VIEW v_history_job AS
SELECT h.pk_job, h.str_name, h.str_shot, h.str_user,
       h.int_core_time_success, h.int_core_time_fail, h.int_gpu_time_success, h.int_gpu_time_fail,
       h.int_frame_count, h.int_layer_count, h.int_waiting_count, h.int_dead_count, h.int_depend_count,
       h.int_eaten_count, h.int_succeeded_count, h.int_running_count, h.int_max_rss, h.int_gpu_mem_max, h.b_archived,
       f.str_name AS str_facility_name, d.str_name AS str_dept_name,
       h.int_ts_started, h.int_ts_stopped, s.str_name AS str_show_name, h.dt_last_modified
FROM job_history h
JOIN show s ON s.pk_show = h.pk_show
JOIN facility f ON f.pk_facility = h.pk_facility
JOIN dept d ON d.pk_dept = h.pk_dept
WHERE h.int_ts_stopped = 0 OR h.dt_last_modified >= (SELECT dt_begin FROM history_period);

CREATE VIEW v_history_layer AS
SELECT l.pk_layer, l.pk_job, l.str_name, l.str_type,
       l.int_cores_min, l.int_mem_min, l.int_gpus_min, l.int_gpu_mem_min,
       l.int_core_time_success, l.int_core_time_fail, l.int_gpu_time_success, l.int_gpu_time_fail,
       l.int_frame_count, l.int_layer_count, l.int_waiting_count, l.int_dead_count, l.int_depend_count,
       l.int_eaten_count, l.int_succeeded_count, l.int_running_count, l.int_max_rss, l.int_gpu_mem_max, l.b_archived,
       l.str_services, s.str_name AS str_show_name, l.dt_last_modified
FROM layer_history l
JOIN job_history h ON h.pk_job = l.pk_job
JOIN show s ON s.pk_show = h.pk_show
JOIN history_period span ON h.dt_last_modified >= span.dt_begin AND h.dt_last_modified < span.dt_end;

CREATE VIEW v_history_frame AS
SELECT r.pk_frame_history, r.pk_frame, r.pk_layer, r.pk_job, r.str_name, r.str_state,
       r.int_mem_reserved, r.int_mem_max_used, r.int_cores,
       r.int_gpu_mem_reserved, r.int_gpu_mem_max_used, r.int_gpus, r.str_host, r.int_exit_status,
       a.str_name AS str_alloc_name, a.b_billable AS b_alloc_billable, f.str_name AS str_facility_name,
       r.int_ts_started, r.int_ts_stopped, r.int_checkpoint_count, s.str_name::text AS str_show_name, r.dt_last_modified
FROM frame_history r
JOIN job_history h ON h.pk_job = r.pk_job
JOIN show s ON s.pk_show = h.pk_show
JOIN history_period span ON r.dt_last_modified >= span.dt_begin AND r.dt_last_modified < span.dt_end
LEFT JOIN alloc a ON a.pk_alloc = r.pk_alloc
LEFT JOIN facility f ON f.pk_facility = a.pk_facility;
