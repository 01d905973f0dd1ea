-- Shows, money and rules: who may use how much of which allocation.
-- Names, types, defaults and constraints are OpenCue's; ids are varchar(36) everywhere.

-- A site. Jobs and allocations belong to one.
CREATE TABLE facility (
    pk_facility varchar(36) NOT NULL,
    str_name varchar(36) NOT NULL,
    b_default boolean NOT NULL DEFAULT false,
    CONSTRAINT c_facility_pk PRIMARY KEY (pk_facility)
);

-- A department; a job belongs to one, and its use is counted per department and show in point.
CREATE TABLE dept (
    pk_dept varchar(36) NOT NULL,
    str_name varchar(36) NOT NULL,
    b_default boolean NOT NULL DEFAULT false,
    CONSTRAINT c_dept_pk PRIMARY KEY (pk_dept)
);

-- b_scheduler_managed hands the show to this scheduler; Cuebot then leaves its frames alone.
CREATE TABLE show (
    pk_show varchar(36) NOT NULL,
    str_name varchar(512) NOT NULL,
    b_paused boolean NOT NULL DEFAULT false,
    int_default_min_cores integer NOT NULL DEFAULT 100,
    int_default_max_cores integer NOT NULL DEFAULT 10000,
    b_booking_enabled boolean NOT NULL DEFAULT true,
    b_dispatch_enabled boolean NOT NULL DEFAULT true,
    b_active boolean NOT NULL DEFAULT true,
    str_comment_email varchar(1024),
    int_default_min_gpus integer NOT NULL DEFAULT 100,
    int_default_max_gpus integer NOT NULL DEFAULT 100000,
    b_scheduler_managed boolean NOT NULL DEFAULT false,
    CONSTRAINT c_show_pk PRIMARY KEY (pk_show)
);

CREATE TABLE show_alias (
    pk_show_alias varchar(36) NOT NULL,
    pk_show varchar(36) NOT NULL,
    str_name varchar(16) NOT NULL,
    CONSTRAINT c_show_alias_pk PRIMARY KEY (pk_show_alias),
    CONSTRAINT c_show_alias_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE INDEX i_show_alias_pk_show ON show_alias (pk_show);

CREATE TABLE show_stats (
    pk_show varchar(36) NOT NULL,
    int_frame_insert_count bigint NOT NULL DEFAULT 0,
    int_job_insert_count bigint NOT NULL DEFAULT 0,
    int_frame_success_count bigint NOT NULL DEFAULT 0,
    int_frame_fail_count bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_show_stats_pk PRIMARY KEY (pk_show)
);

-- A pool of hosts, found by tag, in one facility.
CREATE TABLE alloc (
    pk_alloc varchar(36) NOT NULL,
    str_name varchar(36) NOT NULL,
    b_allow_edit boolean NOT NULL DEFAULT true,
    b_default boolean NOT NULL DEFAULT false,
    str_tag varchar(24),
    b_billable boolean NOT NULL DEFAULT true,
    pk_facility varchar(36) NOT NULL,
    b_enabled boolean DEFAULT true,
    CONSTRAINT c_alloc_pk PRIMARY KEY (pk_alloc),
    CONSTRAINT c_alloc_name_uniq UNIQUE (str_name),
    CONSTRAINT c_alloc_pk_facility FOREIGN KEY (pk_facility) REFERENCES facility(pk_facility)
);
CREATE INDEX i_alloc_pk_facility ON alloc (pk_facility);

-- What a show may use of an allocation, in centicores: size is what it pays for, burst the cap.
CREATE TABLE subscription (
    pk_subscription varchar(36) NOT NULL,
    pk_alloc varchar(36) NOT NULL,
    pk_show varchar(36) NOT NULL,
    int_size bigint NOT NULL DEFAULT 0,
    int_burst bigint NOT NULL DEFAULT 0,
    int_cores integer NOT NULL DEFAULT 0,
    float_tier numeric(16,2) NOT NULL DEFAULT 0,
    int_gpus integer NOT NULL DEFAULT 0,
    CONSTRAINT c_subscription_pk PRIMARY KEY (pk_subscription),
    CONSTRAINT c_subscription_uk UNIQUE (pk_show, pk_alloc),
    CONSTRAINT c_subscription_pk_alloc FOREIGN KEY (pk_alloc) REFERENCES alloc(pk_alloc),
    CONSTRAINT c_subscription_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE INDEX i_subscription_pkalloc ON subscription (pk_alloc);

-- Jobs are grouped in folders. The caps that count live in folder_resource.
CREATE TABLE folder (
    pk_folder varchar(36) NOT NULL,
    pk_parent_folder varchar(36),
    pk_show varchar(36) NOT NULL,
    str_name varchar(36) NOT NULL,
    int_priority bigint NOT NULL DEFAULT 1,
    b_default boolean NOT NULL DEFAULT false,
    pk_dept varchar(36) NOT NULL,
    int_job_min_cores integer NOT NULL DEFAULT -1,
    int_job_max_cores integer NOT NULL DEFAULT -1,
    int_job_priority integer NOT NULL DEFAULT -1,
    int_min_cores integer NOT NULL DEFAULT 0,
    int_max_cores integer NOT NULL DEFAULT -1,
    b_exclude_managed boolean NOT NULL DEFAULT false,
    f_order integer NOT NULL DEFAULT 0,
    int_job_min_gpus integer NOT NULL DEFAULT -1,
    int_job_max_gpus integer NOT NULL DEFAULT -1,
    int_min_gpus integer NOT NULL DEFAULT 0,
    int_max_gpus integer NOT NULL DEFAULT -1,
    CONSTRAINT c_folder_pk PRIMARY KEY (pk_folder),
    CONSTRAINT c_folder_uk UNIQUE (pk_parent_folder, str_name),
    CONSTRAINT c_folder_pk_dept FOREIGN KEY (pk_dept) REFERENCES dept(pk_dept),
    CONSTRAINT c_folder_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE INDEX i_folder_pkparentfolder ON folder (pk_parent_folder);
CREATE INDEX i_folder_pkshow ON folder (pk_show);
CREATE INDEX i_folder_strname ON folder (str_name);

CREATE TABLE folder_level (
    pk_folder_level varchar(36) NOT NULL,
    pk_folder varchar(36) NOT NULL,
    int_level bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_folder_level_pk PRIMARY KEY (pk_folder_level),
    CONSTRAINT c_folder_level_uk UNIQUE (pk_folder),
    CONSTRAINT c_folder_level_pk_folder FOREIGN KEY (pk_folder) REFERENCES folder(pk_folder)
);

-- Centicores; a maximum <= 0 is no cap.
CREATE TABLE folder_resource (
    pk_folder_resource varchar(36) NOT NULL,
    pk_folder varchar(36) NOT NULL,
    int_cores integer NOT NULL DEFAULT 0,
    int_max_cores integer NOT NULL DEFAULT -1,
    int_min_cores integer NOT NULL DEFAULT 0,
    float_tier numeric(16,2) NOT NULL DEFAULT 0,
    int_gpus integer NOT NULL DEFAULT 0,
    int_max_gpus integer NOT NULL DEFAULT -1,
    int_min_gpus integer NOT NULL DEFAULT 0,
    CONSTRAINT c_folder_resource_pk PRIMARY KEY (pk_folder_resource),
    CONSTRAINT c_folder_resource_pk_folder FOREIGN KEY (pk_folder) REFERENCES folder(pk_folder)
);
CREATE INDEX i_folderresource_pkfolder ON folder_resource (pk_folder);

-- Use per department and show, centicores.
CREATE TABLE point (
    pk_point varchar(36) NOT NULL,
    pk_dept varchar(36) NOT NULL,
    pk_show varchar(36) NOT NULL,
    str_ti_task varchar(36),
    int_cores integer NOT NULL DEFAULT 0,
    b_managed boolean NOT NULL DEFAULT false,
    int_min_cores integer NOT NULL DEFAULT 0,
    float_tier numeric(16,2) NOT NULL DEFAULT 0,
    ts_updated timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    int_gpus integer NOT NULL DEFAULT 0,
    int_min_gpus integer NOT NULL DEFAULT 0,
    CONSTRAINT c_point_pk PRIMARY KEY (pk_point),
    CONSTRAINT c_point_pk_show_dept UNIQUE (pk_show, pk_dept),
    CONSTRAINT c_point_pk_dept FOREIGN KEY (pk_dept) REFERENCES dept(pk_dept),
    CONSTRAINT c_point_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE INDEX i_point_pk_dept ON point (pk_dept);
CREATE INDEX i_point_pk_show ON point (pk_show);

CREATE TABLE task (
    pk_task varchar(36) NOT NULL,
    pk_point varchar(36) NOT NULL,
    str_shot varchar(36) NOT NULL,
    int_min_cores integer NOT NULL DEFAULT 100,
    int_adjust_cores integer NOT NULL DEFAULT 0,
    int_min_gpus integer NOT NULL DEFAULT 0,
    int_adjust_gpus integer NOT NULL DEFAULT 0,
    CONSTRAINT c_task_pk PRIMARY KEY (pk_task),
    CONSTRAINT c_task_uniq UNIQUE (str_shot, pk_point),
    CONSTRAINT c_task_pk_point FOREIGN KEY (pk_point) REFERENCES point(pk_point)
);
CREATE INDEX i_task_pk_point ON task (pk_point);

CREATE TABLE owner (
    pk_owner varchar(36) NOT NULL,
    pk_show varchar(36) NOT NULL,
    str_username varchar(64) NOT NULL,
    ts_created timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ts_updated timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    CONSTRAINT c_pk_owner PRIMARY KEY (pk_owner),
    CONSTRAINT c_owner_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE INDEX i_owner_pk_show ON owner (pk_show);
CREATE UNIQUE INDEX i_owner_str_username ON owner (str_username);

-- A named limit on running frames (licences and the like); layers join it by layer_limit.
CREATE TABLE limit_record (
    pk_limit_record varchar(36) NOT NULL,
    str_name varchar(255) NOT NULL,
    int_max_value integer,
    b_host_limit boolean NOT NULL DEFAULT false
);

-- Defaults of a kind of software. Memory KB, cores centicores, time-outs minutes.
CREATE TABLE service (
    pk_service varchar(36) NOT NULL,
    str_name varchar(36) NOT NULL,
    b_threadable boolean NOT NULL,
    int_cores_min integer NOT NULL,
    int_mem_min integer NOT NULL,
    str_tags varchar(128) NOT NULL,
    int_cores_max integer NOT NULL DEFAULT 0,
    int_gpu_mem_min bigint NOT NULL DEFAULT 0,
    int_timeout integer NOT NULL DEFAULT 0,
    int_timeout_llu integer NOT NULL DEFAULT 0,
    int_gpus_min integer NOT NULL DEFAULT 0,
    int_gpus_max integer NOT NULL DEFAULT 0,
    int_min_memory_increase integer NOT NULL DEFAULT 2097152,
    CONSTRAINT c_pk_service PRIMARY KEY (pk_service)
);
CREATE UNIQUE INDEX i_service_str_name ON service (str_name);

CREATE TABLE show_service (
    pk_show_service varchar(36) NOT NULL,
    pk_show varchar(36) NOT NULL,
    str_name varchar(36) NOT NULL,
    b_threadable boolean NOT NULL,
    int_cores_min integer NOT NULL,
    int_mem_min integer NOT NULL,
    str_tags varchar(128) NOT NULL,
    int_cores_max integer NOT NULL DEFAULT 0,
    int_gpu_mem_min bigint NOT NULL DEFAULT 0,
    int_timeout integer NOT NULL DEFAULT 0,
    int_timeout_llu integer NOT NULL DEFAULT 0,
    int_gpus_min integer NOT NULL DEFAULT 0,
    int_gpus_max integer NOT NULL DEFAULT 0,
    int_min_memory_increase integer NOT NULL DEFAULT 2097152,
    CONSTRAINT c_pk_show_service PRIMARY KEY (pk_show_service),
    CONSTRAINT c_show_service_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE UNIQUE INDEX i_show_service_str_name ON show_service (str_name, pk_show);

CREATE TABLE filter (
    pk_filter varchar(36) NOT NULL,
    pk_show varchar(36) NOT NULL,
    str_name varchar(128) NOT NULL,
    str_type varchar(16) NOT NULL,
    f_order numeric(6,2) NOT NULL DEFAULT 0.0,
    b_enabled boolean NOT NULL DEFAULT true,
    CONSTRAINT c_filter_pk PRIMARY KEY (pk_filter),
    CONSTRAINT c_filter_pk_show FOREIGN KEY (pk_show) REFERENCES show(pk_show)
);
CREATE INDEX i_filters_pk_show ON filter (pk_show);

CREATE TABLE matcher (
    pk_matcher varchar(36) NOT NULL,
    pk_filter varchar(36) NOT NULL,
    str_subject varchar(64) NOT NULL,
    str_match varchar(64) NOT NULL,
    str_value varchar(6000) NOT NULL,
    ts_created timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    CONSTRAINT c_matcher_pk PRIMARY KEY (pk_matcher),
    CONSTRAINT c_matcher_pk_filter FOREIGN KEY (pk_filter) REFERENCES filter(pk_filter)
);
CREATE INDEX i_matcher_pk_filter ON matcher (pk_filter);

CREATE TABLE action (
    pk_action varchar(36) NOT NULL,
    pk_filter varchar(36) NOT NULL,
    pk_folder varchar(36),
    str_action varchar(24) NOT NULL,
    str_value_type varchar(24) NOT NULL,
    str_value varchar(4000),
    int_value bigint,
    b_value boolean,
    ts_created timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    float_value numeric(6,2),
    b_stop boolean NOT NULL DEFAULT false,
    CONSTRAINT c_action_pk PRIMARY KEY (pk_action),
    CONSTRAINT c_action_pk_filter FOREIGN KEY (pk_filter) REFERENCES filter(pk_filter),
    CONSTRAINT c_action_pk_folder FOREIGN KEY (pk_folder) REFERENCES folder(pk_folder)
);
CREATE INDEX i_action_pk_filter ON action (pk_filter);
CREATE INDEX i_action_pk_group ON action (pk_folder);

-- Switches; a row with str_key DISABLE_HISTORY stops the history triggers.
CREATE TABLE config (
    pk_config varchar(36) NOT NULL,
    str_key varchar(36) NOT NULL,
    int_value bigint DEFAULT 0,
    long_value bigint DEFAULT 0,
    str_value varchar(255) DEFAULT '',
    b_value boolean DEFAULT false,
    CONSTRAINT c_pk_pkconfig PRIMARY KEY (pk_config),
    CONSTRAINT c_show_uk UNIQUE (str_key)
);

-- Maintenance locks of Cuebot: int_lock is epoch milliseconds, 0 when free.
CREATE TABLE task_lock (
    pk_task_lock varchar(36) NOT NULL,
    str_name varchar(36) NOT NULL,
    int_lock bigint NOT NULL DEFAULT 0,
    int_timeout bigint NOT NULL DEFAULT 30,
    ts_lastrun timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    CONSTRAINT c_task_lock_pk PRIMARY KEY (pk_task_lock)
);
