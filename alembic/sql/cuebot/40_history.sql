-- What happened: rows that outlive the job they describe.
-- Names, types, defaults and constraints are OpenCue's; ids are varchar(36) everywhere.

CREATE TABLE job_history (
    pk_job varchar(36) NOT NULL,
    pk_show varchar(36) NOT NULL,
    str_name varchar(512) NOT NULL,
    str_shot varchar(64) NOT NULL,
    str_user varchar(36) NOT NULL,
    int_core_time_success bigint NOT NULL DEFAULT 0,
    int_core_time_fail bigint NOT NULL DEFAULT 0,
    int_frame_count bigint NOT NULL DEFAULT 0,
    int_layer_count bigint NOT NULL DEFAULT 0,
    int_waiting_count bigint NOT NULL DEFAULT 0,
    int_dead_count bigint NOT NULL DEFAULT 0,
    int_depend_count bigint NOT NULL DEFAULT 0,
    int_eaten_count bigint NOT NULL DEFAULT 0,
    int_succeeded_count bigint NOT NULL DEFAULT 0,
    int_running_count bigint NOT NULL DEFAULT 0,
    int_max_rss bigint NOT NULL DEFAULT 0,
    b_archived boolean NOT NULL DEFAULT false,
    pk_facility varchar(36) NOT NULL,
    pk_dept varchar(36) NOT NULL,
    int_ts_started integer NOT NULL,
    int_ts_stopped integer NOT NULL DEFAULT 0,
    dt_last_modified date NOT NULL,
    int_gpu_time_success bigint NOT NULL DEFAULT 0,
    int_gpu_time_fail bigint NOT NULL DEFAULT 0,
    int_gpu_mem_max bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_job_history_pk PRIMARY KEY (pk_job),
    CONSTRAINT c_job_history_pk_dept FOREIGN KEY (pk_dept) REFERENCES dept(pk_dept),
    CONSTRAINT c_job_history_pk_facility FOREIGN KEY (pk_facility) REFERENCES facility(pk_facility),
    CONSTRAINT c_job_history_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE INDEX i_job_history_pk_dept ON job_history (pk_dept);
CREATE INDEX i_job_history_pk_facility ON job_history (pk_facility);
CREATE INDEX i_job_history_pk_show ON job_history (pk_show);
CREATE INDEX i_job_history_str_name ON job_history (str_name);
CREATE INDEX i_job_history_str_shot ON job_history (str_shot);
CREATE INDEX i_job_history_str_user ON job_history (str_user);
CREATE INDEX i_job_history_ts_start_stop ON job_history (int_ts_started, int_ts_stopped);

CREATE TABLE layer_history (
    pk_layer varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    str_name varchar(512) NOT NULL,
    str_type varchar(16) NOT NULL,
    int_cores_min bigint NOT NULL DEFAULT 100,
    int_mem_min bigint NOT NULL DEFAULT 4194304,
    int_core_time_success bigint NOT NULL DEFAULT 0,
    int_core_time_fail bigint NOT NULL DEFAULT 0,
    int_frame_count bigint NOT NULL DEFAULT 0,
    int_layer_count bigint NOT NULL DEFAULT 0,
    int_waiting_count bigint NOT NULL DEFAULT 0,
    int_dead_count bigint NOT NULL DEFAULT 0,
    int_depend_count bigint NOT NULL DEFAULT 0,
    int_eaten_count bigint NOT NULL DEFAULT 0,
    int_succeeded_count bigint NOT NULL DEFAULT 0,
    int_running_count bigint NOT NULL DEFAULT 0,
    int_max_rss bigint NOT NULL DEFAULT 0,
    b_archived boolean NOT NULL DEFAULT false,
    dt_last_modified date NOT NULL,
    str_services varchar(128),
    int_gpus_min integer NOT NULL DEFAULT 0,
    int_gpu_time_success bigint NOT NULL DEFAULT 0,
    int_gpu_time_fail bigint NOT NULL DEFAULT 0,
    int_gpu_mem_min bigint NOT NULL DEFAULT 0,
    int_gpu_mem_max bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_layer_history_pk PRIMARY KEY (pk_layer),
    CONSTRAINT c_layer_history_pk_job FOREIGN KEY (pk_job) REFERENCES job_history(pk_job) ON DELETE CASCADE
);
CREATE INDEX i_layer_history_pk_job ON layer_history (pk_job);
CREATE INDEX i_layer_history_str_name ON layer_history (str_name);

-- One row per run of a frame; int_ts_stopped 0 while it runs. Epoch seconds.
CREATE TABLE frame_history (
    pk_frame_history varchar(36) NOT NULL DEFAULT gen_random_uuid()::text,
    pk_frame varchar(36) NOT NULL,
    pk_layer varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    str_name varchar(256) NOT NULL,
    str_state varchar(24) NOT NULL,
    int_mem_reserved bigint NOT NULL DEFAULT 0,
    int_mem_max_used bigint NOT NULL DEFAULT 0,
    int_cores integer NOT NULL DEFAULT 100,
    str_host varchar(64),
    int_exit_status smallint NOT NULL DEFAULT -1,
    pk_alloc varchar(36),
    int_ts_started integer NOT NULL,
    int_ts_stopped integer NOT NULL DEFAULT 0,
    int_checkpoint_count integer NOT NULL DEFAULT 0,
    dt_last_modified date NOT NULL,
    int_gpus integer NOT NULL DEFAULT 0,
    int_gpu_mem_reserved bigint NOT NULL DEFAULT 0,
    int_gpu_mem_max_used bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_frame_history_pk PRIMARY KEY (pk_frame_history),
    CONSTRAINT c_frame_history_pk_alloc FOREIGN KEY (pk_alloc) REFERENCES alloc(pk_alloc),
    CONSTRAINT c_frame_history_pk_job FOREIGN KEY (pk_job) REFERENCES job_history(pk_job) ON DELETE CASCADE,
    CONSTRAINT c_frame_history_pk_layer FOREIGN KEY (pk_layer) REFERENCES layer_history(pk_layer) ON DELETE CASCADE
);
CREATE INDEX i_frame_history_pk_alloc ON frame_history (pk_alloc);
CREATE INDEX i_frame_history_pk_frame ON frame_history (pk_frame);
CREATE INDEX i_frame_history_pk_job ON frame_history (pk_job);
CREATE INDEX i_frame_history_pk_layer ON frame_history (pk_layer);
CREATE INDEX i_frame_history_ts_start_stop ON frame_history (int_ts_started, int_ts_stopped);

-- The span that reports on history look at.
CREATE TABLE history_period (
    pk varchar(36) NOT NULL DEFAULT gen_random_uuid()::text,
    dt_begin date NOT NULL DEFAULT date '2000-01-01',
    dt_end date NOT NULL DEFAULT CURRENT_TIMESTAMP,
    CONSTRAINT c_history_period_pk PRIMARY KEY (pk)
);
