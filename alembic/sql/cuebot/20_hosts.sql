-- Render hosts: what they have, what is idle, how they are found by tag.
-- Names, types, defaults and constraints are OpenCue's; ids are varchar(36) everywhere.

-- Cores are centicores, memory KB, GPUs whole. Idle columns never go negative: a trigger refuses it.
CREATE TABLE host (
    pk_host varchar(36) NOT NULL,
    pk_alloc varchar(36) NOT NULL,
    str_name varchar(45) NOT NULL,
    str_lock_state varchar(36) NOT NULL,
    b_nimby boolean NOT NULL DEFAULT false,
    ts_created timestamp(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    int_cores bigint NOT NULL DEFAULT 0,
    int_procs bigint NOT NULL DEFAULT 0,
    int_cores_idle bigint NOT NULL DEFAULT 0,
    int_mem bigint NOT NULL DEFAULT 0,
    int_mem_idle bigint NOT NULL DEFAULT 0,
    b_unlock_boot boolean NOT NULL DEFAULT false,
    b_unlock_idle boolean NOT NULL DEFAULT false,
    b_reboot_idle boolean NOT NULL DEFAULT false,
    str_tags varchar(128),
    str_fqdn varchar(128),
    b_comment boolean NOT NULL DEFAULT false,
    int_thread_mode integer NOT NULL DEFAULT 0,
    str_lock_source varchar(128),
    int_gpu_mem bigint NOT NULL DEFAULT 0,
    int_gpu_mem_idle bigint NOT NULL DEFAULT 0,
    int_gpus bigint NOT NULL DEFAULT 0,
    int_gpus_idle bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_host_pk PRIMARY KEY (pk_host),
    CONSTRAINT c_host_uk UNIQUE (str_name),
    CONSTRAINT c_str_host_fqdn_uk UNIQUE (str_fqdn),
    CONSTRAINT c_host_pk_alloc FOREIGN KEY (pk_alloc) REFERENCES alloc(pk_alloc)
);
CREATE INDEX i_host_pkalloc ON host (pk_alloc);
CREATE INDEX i_host_strlockstate ON host (str_lock_state);

-- The last report of the host. Memory KB, load in hundredths.
CREATE TABLE host_stat (
    pk_host_stat varchar(36) NOT NULL,
    pk_host varchar(36) NOT NULL,
    int_mem_total bigint NOT NULL DEFAULT 0,
    int_mem_free bigint NOT NULL DEFAULT 0,
    int_swap_total bigint NOT NULL DEFAULT 0,
    int_swap_free bigint NOT NULL DEFAULT 0,
    int_mcp_total bigint NOT NULL DEFAULT 0,
    int_mcp_free bigint NOT NULL DEFAULT 0,
    int_load bigint NOT NULL DEFAULT 0,
    ts_ping timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    ts_booted timestamptz(6) NOT NULL DEFAULT CURRENT_TIMESTAMP,
    str_state varchar(32) NOT NULL DEFAULT 'UP',
    str_os varchar(32) NOT NULL DEFAULT 'rhel40',
    int_gpu_mem_total bigint NOT NULL DEFAULT 0,
    int_gpu_mem_free bigint NOT NULL DEFAULT 0,
    CONSTRAINT c_hoststat_pk PRIMARY KEY (pk_host_stat),
    CONSTRAINT c_host_stat_pk_host_uk UNIQUE (pk_host),
    CONSTRAINT c_host_stat_pk_host FOREIGN KEY (pk_host) REFERENCES host(pk_host)
);

-- Tags by origin: MANUAL, HARDWARE, ALLOC, HOSTNAME. host.str_tags is rebuilt from these rows.
CREATE TABLE host_tag (
    pk_host_tag varchar(36) NOT NULL,
    pk_host varchar(36) NOT NULL,
    str_tag varchar(45) NOT NULL,
    str_tag_type varchar(24) NOT NULL DEFAULT 'Hardware',
    b_constant boolean NOT NULL DEFAULT false,
    CONSTRAINT c_host_tag_pk PRIMARY KEY (pk_host_tag)
);
CREATE INDEX i_host_str_tag_type ON host_tag (str_tag_type);
CREATE INDEX i_host_tag_pk_host ON host_tag (pk_host);

-- A workstation that a person lends to the farm.
CREATE TABLE deed (
    pk_deed varchar(36) NOT NULL,
    pk_owner varchar(36) NOT NULL,
    pk_host varchar(36) NOT NULL,
    b_blackout boolean NOT NULL DEFAULT false,
    int_blackout_start integer,
    int_blackout_stop integer,
    CONSTRAINT c_pk_deed PRIMARY KEY (pk_deed),
    CONSTRAINT c_deed_pk_host FOREIGN KEY (pk_host) REFERENCES host(pk_host)
);
CREATE UNIQUE INDEX i_deed_pk_host ON deed (pk_host);
CREATE INDEX i_deed_pk_owner ON deed (pk_owner);
