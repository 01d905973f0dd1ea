-- Jobs and layers with the one-to-one rows that count them.
-- Names, types, defaults and constraints are OpenCue's; ids are varchar(36) everywhere.

-- str_visible_name is unique among live jobs and nulled when the job finishes.
CREATE TABLE job (
    pk_job varchar(36) NOT NULL,
    pk_folder varchar(36) NOT NULL,
    pk_show varchar(36) NOT NULL,
    str_name varchar(255) NOT NULL,
    str_visible_name varchar(255),
    str_shot varchar(64) NOT NULL,
    str_user varchar(32) NOT NULL,
    str_state varchar(16) NOT NULL,
    str_log_dir varchar(4000) NOT NULL DEFAULT '',
    int_uid bigint,
    b_paused boolean NOT NULL DEFAULT false,
    b_autoeat boolean NOT NULL DEFAULT false,
    int_frame_count integer NOT NULL DEFAULT 0,
    int_layer_count integer NOT NULL DEFAULT 0,
    int_max_retries smallint NOT NULL DEFAULT 3,
    b_auto_book boolean NOT NULL DEFAULT true,
    b_auto_unbook boolean NOT NULL DEFAULT true,
    b_comment boolean NOT NULL DEFAULT false,
    str_email varchar(256),
    pk_facility varchar(36) NOT NULL,
    pk_dept varchar(36) NOT NULL,
    ts_started timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ts_stopped timestamptz(6),
    int_min_cores integer NOT NULL DEFAULT 100,
    int_max_cores integer NOT NULL DEFAULT 20000,
    str_show varchar(512) NOT NULL DEFAULT 'none',
    ts_updated timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    str_os varchar(12),
    int_min_gpus integer NOT NULL DEFAULT 0,
    int_max_gpus integer NOT NULL DEFAULT 100000,
    str_loki_url varchar(256),
    ts_eligible timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    CONSTRAINT c_job_pk PRIMARY KEY (pk_job),
    CONSTRAINT c_job_uk UNIQUE (str_visible_name),
    CONSTRAINT c_job_pk_dept FOREIGN KEY (pk_dept) REFERENCES dept(pk_dept),
    CONSTRAINT c_job_pk_facility FOREIGN KEY (pk_facility) REFERENCES facility(pk_facility),
    CONSTRAINT c_job_pk_folder FOREIGN KEY (pk_folder) REFERENCES folder(pk_folder),
    CONSTRAINT c_job_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE INDEX i_job_active_pkjob ON job (pk_job) WHERE str_state <> 'FINISHED';
CREATE INDEX i_job_pk_dept ON job (pk_dept);
CREATE INDEX i_job_pk_facility ON job (pk_facility);
CREATE INDEX i_job_pkgroup ON job (pk_folder);
CREATE INDEX i_job_pkshow ON job (pk_show);
CREATE INDEX i_job_str_name ON job (str_name);
CREATE INDEX i_job_str_shot ON job (str_shot);
CREATE INDEX i_job_str_state ON job (str_state);
CREATE INDEX idx_job_pending_lookup ON job (pk_show, pk_facility, str_state, b_paused)
    WHERE str_state = 'PENDING' AND b_paused = false;

-- Frames of the job by state, kept by the frame triggers.
CREATE TABLE job_stat (
    pk_job_stat varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    int_waiting_count bigint NOT NULL DEFAULT 0,
    int_running_count bigint NOT NULL DEFAULT 0,
    int_dead_count bigint NOT NULL DEFAULT 0,
    int_depend_count bigint NOT NULL DEFAULT 0,
    int_eaten_count bigint NOT NULL DEFAULT 0,
    int_succeeded_count bigint NOT NULL DEFAULT 0,
    int_checkpoint_count bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_job_stat_pk PRIMARY KEY (pk_job_stat),
    CONSTRAINT c_job_stat_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);
CREATE UNIQUE INDEX i_job_stat_pk_job ON job_stat (pk_job);

-- Caps and use of the job, centicores; this int_max_cores is the enforced one.
CREATE TABLE job_resource (
    pk_job_resource varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    int_cores bigint NOT NULL DEFAULT 0,
    int_max_rss bigint NOT NULL DEFAULT 0,
    int_max_vss bigint NOT NULL DEFAULT 0,
    int_min_cores integer NOT NULL DEFAULT 100,
    int_max_cores integer NOT NULL DEFAULT 10000,
    float_tier numeric(16,2) NOT NULL DEFAULT 0,
    int_priority integer NOT NULL DEFAULT 1,
    int_local_cores integer NOT NULL DEFAULT 0,
    int_gpus integer NOT NULL DEFAULT 0,
    int_min_gpus integer NOT NULL DEFAULT 0,
    int_max_gpus integer NOT NULL DEFAULT 100,
    int_local_gpus integer NOT NULL DEFAULT 0,
    int_gpu_mem_max bigint NOT NULL DEFAULT 0,
    int_max_pss bigint DEFAULT 0,
    CONSTRAINT c_job_resource_pk PRIMARY KEY (pk_job_resource),
    CONSTRAINT c_job_resource_uk UNIQUE (pk_job),
    CONSTRAINT c_job_resource_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);
CREATE INDEX i_job_resource_int_priority ON job_resource (int_priority);

CREATE TABLE job_usage (
    pk_job_usage varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    int_core_time_success bigint NOT NULL DEFAULT 0,
    int_core_time_fail bigint NOT NULL DEFAULT 0,
    int_frame_success_count integer NOT NULL DEFAULT 0,
    int_frame_fail_count integer NOT NULL DEFAULT 0,
    int_clock_time_fail integer NOT NULL DEFAULT 0,
    int_clock_time_high integer NOT NULL DEFAULT 0,
    int_clock_time_success integer NOT NULL DEFAULT 0,
    int_gpu_time_success bigint NOT NULL DEFAULT 0,
    int_gpu_time_fail bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_job_usage_pk PRIMARY KEY (pk_job_usage),
    CONSTRAINT c_job_usage_pk_job_uniq UNIQUE (pk_job),
    CONSTRAINT c_job_usage_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);

CREATE TABLE job_mem (
    pk_job_mem varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    int_max_rss bigint NOT NULL DEFAULT 0,
    int_max_vss bigint NOT NULL DEFAULT 0,
    int_gpu_mem_max bigint NOT NULL DEFAULT 0,
    int_max_pss bigint DEFAULT 0,
    CONSTRAINT c_job_mem_pk PRIMARY KEY (pk_job_mem),
    CONSTRAINT c_job_mem_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);
CREATE UNIQUE INDEX i_job_mem_pk_job ON job_mem (pk_job);

CREATE TABLE job_env (
    pk_job_env varchar(36) NOT NULL,
    pk_job varchar(36),
    str_key varchar(2048),
    str_value varchar(2048),
    CONSTRAINT c_job_env_pk PRIMARY KEY (pk_job_env),
    CONSTRAINT c_job_env_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);
CREATE INDEX i_job_env_pk_job ON job_env (pk_job);

CREATE TABLE job_post (
    pk_job_post varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    pk_post_job varchar(36) NOT NULL,
    CONSTRAINT c_job_post_pk PRIMARY KEY (pk_job_post),
    CONSTRAINT c_job_post_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job),
    CONSTRAINT c_job_post_pk_post_job FOREIGN KEY (pk_post_job) REFERENCES job(pk_job)
);
CREATE INDEX i_job_post_pk_job ON job_post (pk_job);
CREATE INDEX i_job_post_pk_post_job ON job_post (pk_post_job);

CREATE TABLE job_local (
    pk_job_local varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    pk_host varchar(36) NOT NULL,
    str_source varchar(255) NOT NULL,
    ts_created timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    int_cores integer NOT NULL DEFAULT 0,
    int_max_cores integer NOT NULL,
    int_gpus integer NOT NULL DEFAULT 0,
    int_max_gpus integer NOT NULL DEFAULT 0,
    CONSTRAINT c_pk_job_local PRIMARY KEY (pk_job_local),
    CONSTRAINT c_job_local_pk_host FOREIGN KEY (pk_host) REFERENCES host(pk_host),
    CONSTRAINT c_job_local_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);
CREATE UNIQUE INDEX i_job_local_pk_host ON job_local (pk_host);
CREATE UNIQUE INDEX i_job_local_pk_job ON job_local (pk_job);

-- Cores centicores, memory KB, time-outs minutes. int_cores_max 0 is no cap.
CREATE TABLE layer (
    pk_layer varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    str_name varchar(256) NOT NULL,
    str_cmd varchar(4000) NOT NULL,
    str_range varchar(4000) NOT NULL,
    int_chunk_size bigint NOT NULL DEFAULT 1,
    int_dispatch_order bigint NOT NULL DEFAULT 1,
    int_cores_min bigint NOT NULL DEFAULT 100,
    int_mem_min bigint NOT NULL DEFAULT 4194304,
    str_tags varchar(4000) NOT NULL DEFAULT '',
    str_type varchar(16) NOT NULL,
    b_threadable boolean NOT NULL DEFAULT true,
    str_services varchar(128) NOT NULL DEFAULT 'default',
    b_optimize boolean NOT NULL DEFAULT true,
    int_cores_max integer NOT NULL DEFAULT 0,
    int_gpu_mem_min bigint NOT NULL DEFAULT 0,
    int_timeout integer NOT NULL DEFAULT 0,
    int_timeout_llu integer NOT NULL DEFAULT 0,
    int_gpus_min bigint NOT NULL DEFAULT 0,
    int_gpus_max bigint NOT NULL DEFAULT 0,
    ts_eligible timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ts_start_after timestamptz(6),
    str_start_after_reason varchar(255),
    CONSTRAINT c_layer_pk PRIMARY KEY (pk_layer),
    CONSTRAINT c_layer_str_name_unq UNIQUE (str_name, pk_job),
    CONSTRAINT c_layer_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);
CREATE INDEX i_layer_pkjob ON layer (pk_job);
CREATE INDEX i_layer_start_after ON layer (ts_start_after) WHERE ts_start_after IS NOT NULL;
CREATE INDEX i_layer_strname ON layer (str_name);
CREATE INDEX idx_layer_tags_array ON layer USING gin (string_to_array(replace((str_tags), ' ', ''), '|'));

-- Frames of the layer by state, kept by the frame triggers.
CREATE TABLE layer_stat (
    pk_layer_stat varchar(36) NOT NULL,
    pk_layer varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    int_total_count bigint NOT NULL DEFAULT 0,
    int_waiting_count bigint NOT NULL DEFAULT 0,
    int_running_count bigint NOT NULL DEFAULT 0,
    int_dead_count bigint NOT NULL DEFAULT 0,
    int_depend_count bigint NOT NULL DEFAULT 0,
    int_eaten_count bigint NOT NULL DEFAULT 0,
    int_succeeded_count bigint NOT NULL DEFAULT 0,
    int_checkpoint_count bigint NOT NULL DEFAULT 0,
    ts_started timestamptz(6),
    ts_stopped timestamptz(6),
    CONSTRAINT c_layerstat_pk PRIMARY KEY (pk_layer_stat),
    CONSTRAINT c_layer_stat_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job),
    CONSTRAINT c_layer_stat_pk_layer FOREIGN KEY (pk_layer) REFERENCES layer(pk_layer)
);
CREATE UNIQUE INDEX i_layer_stat_pk_layer ON layer_stat (pk_layer);
CREATE INDEX i_layerstat_pkjob ON layer_stat (pk_job);
CREATE INDEX idx_layer_stat_waiting ON layer_stat (pk_layer) WHERE int_waiting_count > 0;

CREATE TABLE layer_resource (
    pk_layer_resource varchar(36) NOT NULL,
    pk_layer varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    int_cores bigint NOT NULL DEFAULT 0,
    int_max_rss bigint NOT NULL DEFAULT 0,
    int_max_vss bigint NOT NULL DEFAULT 0,
    int_gpus integer NOT NULL DEFAULT 0,
    int_gpu_mem_max bigint NOT NULL DEFAULT 0,
    int_max_pss bigint DEFAULT 0,
    CONSTRAINT c_layerresource_pk PRIMARY KEY (pk_layer_resource),
    CONSTRAINT c_layerresource_uk UNIQUE (pk_layer),
    CONSTRAINT c_layer_resource_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job),
    CONSTRAINT c_layer_resource_pk_layer FOREIGN KEY (pk_layer) REFERENCES layer(pk_layer)
);
CREATE INDEX i_layer_resource_pk_job ON layer_resource (pk_job);

CREATE TABLE layer_usage (
    pk_layer_usage varchar(36) NOT NULL,
    pk_layer varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    int_core_time_success bigint NOT NULL DEFAULT 0,
    int_core_time_fail bigint NOT NULL DEFAULT 0,
    int_frame_success_count integer NOT NULL DEFAULT 0,
    int_frame_fail_count integer NOT NULL DEFAULT 0,
    int_clock_time_fail integer NOT NULL DEFAULT 0,
    int_clock_time_high integer NOT NULL DEFAULT 0,
    int_clock_time_low integer NOT NULL DEFAULT 0,
    int_clock_time_success integer NOT NULL DEFAULT 0,
    int_gpu_time_success bigint NOT NULL DEFAULT 0,
    int_gpu_time_fail bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_layer_usage_pk PRIMARY KEY (pk_layer_usage),
    CONSTRAINT c_layer_usage_pk_layer_uk UNIQUE (pk_layer),
    CONSTRAINT c_layer_usage_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job),
    CONSTRAINT c_layer_usage_pk_layer FOREIGN KEY (pk_layer) REFERENCES layer(pk_layer)
);
CREATE INDEX i_layer_usage_pk_job ON layer_usage (pk_job);

CREATE TABLE layer_mem (
    pk_layer_mem varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    pk_layer varchar(36) NOT NULL,
    int_max_rss bigint NOT NULL DEFAULT 0,
    int_max_vss bigint NOT NULL DEFAULT 0,
    int_gpu_mem_max bigint NOT NULL DEFAULT 0,
    int_max_pss bigint DEFAULT 0,
    CONSTRAINT c_layer_mem_pk PRIMARY KEY (pk_layer_mem),
    CONSTRAINT c_layer_mem_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job),
    CONSTRAINT c_layer_mem_pk_layer FOREIGN KEY (pk_layer) REFERENCES layer(pk_layer)
);
CREATE INDEX i_layer_mem_pk_job ON layer_mem (pk_job);
CREATE UNIQUE INDEX i_layer_mem_pk_layer ON layer_mem (pk_layer);

CREATE TABLE layer_env (
    pk_layer_env varchar(36) NOT NULL,
    pk_layer varchar(36),
    pk_job varchar(36),
    str_key varchar(2048),
    str_value varchar(2048),
    CONSTRAINT c_layer_env_pk PRIMARY KEY (pk_layer_env),
    CONSTRAINT c_layer_env_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job),
    CONSTRAINT c_layer_env_pk_layer FOREIGN KEY (pk_layer) REFERENCES layer(pk_layer)
);
CREATE INDEX i_layer_env_pk_job ON layer_env (pk_job);
CREATE INDEX i_layer_env_pk_layer ON layer_env (pk_layer);

CREATE SEQUENCE layer_output_ser_order_seq AS integer;
CREATE TABLE layer_output (
    pk_layer_output varchar(36) NOT NULL,
    pk_layer varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    str_filespec varchar(2048) NOT NULL,
    ser_order integer NOT NULL DEFAULT nextval('layer_output_ser_order_seq'),
    CONSTRAINT c_pk_layer_output PRIMARY KEY (pk_layer_output),
    CONSTRAINT c_layer_output_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job),
    CONSTRAINT c_layer_output_pk_layer FOREIGN KEY (pk_layer) REFERENCES layer(pk_layer)
);
ALTER SEQUENCE layer_output_ser_order_seq OWNED BY layer_output.ser_order;
CREATE INDEX i_layer_output_pk_job ON layer_output (pk_job);
CREATE INDEX i_layer_output_pk_layer ON layer_output (pk_layer);
CREATE UNIQUE INDEX i_layer_output_unique ON layer_output (pk_layer, str_filespec);

-- Which limits a layer takes part in.
CREATE TABLE layer_limit (
    pk_layer_limit varchar(36) NOT NULL,
    pk_layer varchar(36) NOT NULL,
    pk_limit_record varchar(36) NOT NULL
);
CREATE INDEX i_layer_limit_pk_layer ON layer_limit (pk_layer);
CREATE INDEX i_layer_limit_pk_limit_record ON layer_limit (pk_limit_record);
