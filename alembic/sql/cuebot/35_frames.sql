-- Frames, what they wait for, and the procs that run them.
-- Names, types, defaults and constraints are OpenCue's; ids are varchar(36) everywhere.

-- int_version guards every change of state.
CREATE TABLE frame (
    pk_frame varchar(36) NOT NULL,
    pk_layer varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    str_name varchar(256) NOT NULL,
    str_state varchar(24) NOT NULL,
    int_number bigint NOT NULL,
    int_depend_count bigint NOT NULL DEFAULT 0,
    int_exit_status bigint NOT NULL DEFAULT -1,
    int_retries bigint NOT NULL DEFAULT 0,
    int_mem_reserved bigint NOT NULL DEFAULT 0,
    int_mem_max_used bigint NOT NULL DEFAULT 0,
    int_mem_used bigint NOT NULL DEFAULT 0,
    int_dispatch_order bigint NOT NULL DEFAULT 0,
    str_host varchar(256),
    int_cores integer NOT NULL DEFAULT 0,
    int_layer_order integer NOT NULL,
    ts_started timestamptz(6),
    ts_stopped timestamptz(6),
    ts_last_run timestamptz(6),
    ts_updated timestamptz(6),
    int_version integer DEFAULT 0,
    str_checkpoint_state varchar(12) NOT NULL DEFAULT 'DISABLED',
    int_checkpoint_count smallint NOT NULL DEFAULT 0,
    int_gpu_mem_reserved bigint NOT NULL DEFAULT 0,
    int_total_past_core_time integer NOT NULL DEFAULT 0,
    ts_llu timestamptz(6),
    int_gpu_mem_used bigint NOT NULL DEFAULT 0,
    int_gpu_mem_max_used bigint NOT NULL DEFAULT 0,
    int_gpus integer NOT NULL DEFAULT 0,
    int_total_past_gpu_time integer NOT NULL DEFAULT 0,
    int_pss_max_used bigint DEFAULT 0,
    int_pss_used bigint DEFAULT 0,
    ts_eligible timestamptz(6),
    CONSTRAINT c_frame_pk PRIMARY KEY (pk_frame),
    CONSTRAINT c_frame_str_name_unq UNIQUE (str_name, pk_job),
    CONSTRAINT c_frame_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job),
    CONSTRAINT c_frame_pk_layer FOREIGN KEY (pk_layer) REFERENCES layer(pk_layer)
);
CREATE INDEX i_frame_depend_candidates ON frame (pk_job, pk_layer, pk_frame)
    WHERE str_state = 'DEPEND' AND int_depend_count > 0;
CREATE INDEX i_frame_pk_job ON frame (pk_job);
CREATE INDEX i_frame_pkjoblayer ON frame (pk_layer);
CREATE INDEX i_frame_state_job ON frame (str_state, pk_job);

CREATE TABLE frame_state_display_overrides (
    pk_frame_override varchar(36) NOT NULL,
    pk_frame varchar(36) NOT NULL,
    str_frame_state varchar(24) NOT NULL,
    str_override_text varchar(24) NOT NULL,
    str_rgb varchar(24) NOT NULL,
    CONSTRAINT c_frame_state_override UNIQUE (pk_frame, str_frame_state),
    CONSTRAINT c_frame_state_overrides_pk_frame FOREIGN KEY (pk_frame) REFERENCES frame(pk_frame)
);

-- One dependency: _er waits for _on.
CREATE TABLE depend (
    pk_depend varchar(36) NOT NULL,
    pk_parent varchar(36),
    pk_job_depend_on varchar(36) NOT NULL,
    pk_job_depend_er varchar(36) NOT NULL,
    pk_frame_depend_on varchar(36),
    pk_frame_depend_er varchar(36),
    pk_layer_depend_on varchar(36),
    pk_layer_depend_er varchar(36),
    str_type varchar(36) NOT NULL,
    b_active boolean NOT NULL DEFAULT true,
    b_any boolean NOT NULL DEFAULT false,
    ts_created timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ts_satisfied timestamp(6),
    str_target varchar(20) NOT NULL DEFAULT 'Internal',
    str_signature varchar(36) NOT NULL,
    b_composite boolean NOT NULL DEFAULT false,
    CONSTRAINT c_depend_pk PRIMARY KEY (pk_depend)
);
CREATE INDEX i_depend_active_er_job_frame ON depend (pk_job_depend_er, pk_frame_depend_er)
    WHERE b_active = true AND pk_frame_depend_er IS NOT NULL;
CREATE INDEX i_depend_active_er_job_layer ON depend (pk_job_depend_er, pk_layer_depend_er)
    WHERE b_active = true AND pk_frame_depend_er IS NULL AND pk_layer_depend_er IS NOT NULL;
CREATE INDEX i_depend_active_er_job_only ON depend (pk_job_depend_er)
    WHERE b_active = true AND pk_frame_depend_er IS NULL AND pk_layer_depend_er IS NULL;
CREATE INDEX i_depend_er_frame ON depend (pk_frame_depend_er);
CREATE INDEX i_depend_er_layer ON depend (pk_layer_depend_er);
CREATE INDEX i_depend_on_frame ON depend (pk_frame_depend_on);
CREATE INDEX i_depend_on_layer ON depend (pk_layer_depend_on);
CREATE INDEX i_depend_pk_er_job ON depend (pk_job_depend_er);
CREATE INDEX i_depend_pk_on_job ON depend (pk_job_depend_on);
CREATE INDEX i_depend_pkparent ON depend (pk_parent);
CREATE UNIQUE INDEX i_depend_signature ON depend (str_signature);

-- One frame on one host. A frame has at most one proc.
CREATE TABLE proc (
    pk_proc varchar(36) NOT NULL,
    pk_host varchar(36) NOT NULL,
    pk_job varchar(36),
    pk_show varchar(36),
    pk_layer varchar(36),
    pk_frame varchar(36),
    int_cores_reserved bigint NOT NULL,
    int_mem_reserved bigint NOT NULL,
    int_mem_used bigint NOT NULL DEFAULT 0,
    int_mem_max_used bigint NOT NULL DEFAULT 0,
    b_unbooked boolean NOT NULL DEFAULT false,
    int_mem_pre_reserved bigint NOT NULL DEFAULT 0,
    int_virt_used bigint NOT NULL DEFAULT 0,
    int_virt_max_used bigint NOT NULL DEFAULT 0,
    str_redirect varchar(265),
    b_local boolean NOT NULL DEFAULT false,
    ts_ping timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ts_booked timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ts_dispatched timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    int_gpu_mem_reserved bigint NOT NULL DEFAULT 0,
    int_gpus_reserved integer NOT NULL DEFAULT 0,
    int_gpu_mem_used bigint NOT NULL DEFAULT 0,
    int_gpu_mem_max_used bigint NOT NULL DEFAULT 0,
    int_gpu_mem_pre_reserved bigint NOT NULL DEFAULT 0,
    bytea_children bytea,
    int_swap_used bigint NOT NULL DEFAULT 0,
    int_pss_max_used bigint DEFAULT 0,
    int_pss_used bigint DEFAULT 0,
    CONSTRAINT c_proc_pk PRIMARY KEY (pk_proc),
    CONSTRAINT c_proc_uk UNIQUE (pk_frame),
    CONSTRAINT c_proc_pk_frame FOREIGN KEY (pk_frame) REFERENCES frame(pk_frame),
    CONSTRAINT c_proc_pk_host FOREIGN KEY (pk_host) REFERENCES host(pk_host)
);
CREATE INDEX i_proc_pkhost ON proc (pk_host);
CREATE INDEX i_proc_pkjob ON proc (pk_job);
CREATE INDEX i_proc_pklayer ON proc (pk_layer);
CREATE INDEX i_proc_pkshow ON proc (pk_show);

-- A proc promised to another job or folder.
CREATE TABLE redirect (
    pk_proc varchar(36) NOT NULL,
    str_group_id varchar(36) NOT NULL,
    int_type bigint NOT NULL,
    str_destination_id varchar(512) NOT NULL,
    str_name varchar(512) NOT NULL,
    lng_creation_time bigint NOT NULL,
    CONSTRAINT c_redirect_pk PRIMARY KEY (pk_proc)
);
CREATE INDEX i_redirect_create ON redirect (lng_creation_time);
CREATE INDEX i_redirect_group ON redirect (str_group_id);

-- Cores a person lends to one job on their own workstation.
CREATE TABLE host_local (
    pk_host_local varchar(36) NOT NULL,
    pk_job varchar(36) NOT NULL,
    pk_layer varchar(36),
    pk_frame varchar(36),
    pk_host varchar(36) NOT NULL,
    ts_created timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ts_updated timestamptz(6),
    int_mem_max bigint NOT NULL DEFAULT 0,
    int_mem_idle bigint NOT NULL DEFAULT 0,
    int_cores_max integer NOT NULL DEFAULT 100,
    int_cores_idle integer NOT NULL DEFAULT 100,
    int_threads integer NOT NULL DEFAULT 1,
    float_tier numeric(16,2) NOT NULL DEFAULT 0,
    b_active boolean NOT NULL DEFAULT true,
    str_type varchar(36) NOT NULL,
    int_gpu_mem_idle bigint NOT NULL DEFAULT 0,
    int_gpu_mem_max bigint NOT NULL DEFAULT 0,
    int_gpus_idle integer NOT NULL DEFAULT 0,
    int_gpus_max integer NOT NULL DEFAULT 0,
    CONSTRAINT c_pk_host_local PRIMARY KEY (pk_host_local),
    CONSTRAINT c_host_local_pk_host FOREIGN KEY (pk_host) REFERENCES host(pk_host),
    CONSTRAINT c_host_local_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);
CREATE INDEX i_host_local ON host_local (pk_host);
CREATE INDEX i_host_local_pk_job ON host_local (pk_job);
CREATE UNIQUE INDEX i_host_local_unique ON host_local (pk_host, pk_job);

CREATE TABLE comments (
    pk_comment varchar(36) NOT NULL,
    pk_job varchar(36),
    pk_host varchar(36),
    ts_created timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    str_user varchar(36) NOT NULL,
    str_subject varchar(128) NOT NULL,
    str_message varchar(4000) NOT NULL,
    CONSTRAINT c_comment_pk PRIMARY KEY (pk_comment),
    CONSTRAINT c_comment_pk_host FOREIGN KEY (pk_host) REFERENCES host(pk_host),
    CONSTRAINT c_comment_pk_job FOREIGN KEY (pk_job) REFERENCES job(pk_job)
);
CREATE INDEX i_comment_pk_host ON comments (pk_host);
CREATE INDEX i_comment_pk_job ON comments (pk_job);
