-- Rows that come with a folder, job or layer; checks that nothing is used which is not there; tier columns.

CREATE FUNCTION trigger__before_insert_folder() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.b_default := true;
    RETURN NEW;
END
$$;
CREATE TRIGGER before_insert_folder BEFORE INSERT ON folder FOR EACH ROW
    WHEN (NEW.pk_parent_folder IS NULL) EXECUTE FUNCTION trigger__before_insert_folder();

CREATE FUNCTION trigger__after_insert_folder() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO folder_level (pk_folder_level, pk_folder, int_level)
    VALUES (NEW.pk_folder, NEW.pk_folder,
            coalesce((SELECT int_level + 1 FROM folder_level WHERE pk_folder = NEW.pk_parent_folder), 0));
    INSERT INTO folder_resource (pk_folder_resource, pk_folder) VALUES (NEW.pk_folder, NEW.pk_folder);
    RETURN NULL;
END
$$;
CREATE TRIGGER after_insert_folder AFTER INSERT ON folder FOR EACH ROW
    EXECUTE FUNCTION trigger__after_insert_folder();

CREATE FUNCTION trigger__before_delete_folder() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    DELETE FROM folder_resource WHERE pk_folder = OLD.pk_folder;
    DELETE FROM folder_level WHERE pk_folder = OLD.pk_folder;
    RETURN OLD;
END
$$;
CREATE TRIGGER before_delete_folder BEFORE DELETE ON folder FOR EACH ROW
    EXECUTE FUNCTION trigger__before_delete_folder();

-- Checks. The texts are matched by Cuebot and by this scheduler.

CREATE FUNCTION trigger__verify_host_resources() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.int_cores_idle < 0 THEN
        RAISE EXCEPTION 'unable to allocate additional core units';
    ELSIF NEW.int_mem_idle < 0 THEN
        RAISE EXCEPTION 'unable to allocate additional memory';
    ELSIF NEW.int_gpus_idle < 0 THEN
        RAISE EXCEPTION 'unable to allocate additional GPU units';
    ELSIF NEW.int_gpu_mem_idle < 0 THEN
        RAISE EXCEPTION 'unable to allocate additional GPU memory';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER verify_host_resources BEFORE UPDATE ON host FOR EACH ROW
    WHEN (NEW.int_cores_idle <> OLD.int_cores_idle OR NEW.int_mem_idle <> OLD.int_mem_idle
          OR NEW.int_gpus_idle <> OLD.int_gpus_idle OR NEW.int_gpu_mem_idle <> OLD.int_gpu_mem_idle)
    EXECUTE FUNCTION trigger__verify_host_resources();

-- Only growth under an unchanged cap is checked, so that lowering a cap below the use is allowed.
CREATE FUNCTION trigger__verify_job_resources() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.int_cores > NEW.int_max_cores THEN
        RAISE EXCEPTION 'job has exceeded max cores';
    ELSIF NEW.int_gpus > NEW.int_max_gpus THEN
        RAISE EXCEPTION 'job has exceeded max GPU units';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER verify_job_resources BEFORE UPDATE ON job_resource FOR EACH ROW
    WHEN ((NEW.int_max_cores = OLD.int_max_cores AND NEW.int_cores > OLD.int_cores)
          OR (NEW.int_max_gpus = OLD.int_max_gpus AND NEW.int_gpus > OLD.int_gpus))
    EXECUTE FUNCTION trigger__verify_job_resources();

CREATE FUNCTION trigger__verify_subscription() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.int_cores > NEW.int_burst THEN
        RAISE EXCEPTION 'subscription has exceeded burst size';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER verify_subscription BEFORE UPDATE ON subscription FOR EACH ROW
    WHEN (NEW.int_burst = OLD.int_burst AND NEW.int_cores > OLD.int_cores)
    EXECUTE FUNCTION trigger__verify_subscription();

CREATE FUNCTION trigger__verify_job_local() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.int_cores > NEW.int_max_cores THEN
        RAISE EXCEPTION 'job local has exceeded max cores';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER verify_job_local BEFORE UPDATE ON job_local FOR EACH ROW
    WHEN (NEW.int_max_cores = OLD.int_max_cores AND NEW.int_cores > OLD.int_cores)
    EXECUTE FUNCTION trigger__verify_job_local();

CREATE FUNCTION trigger__verify_host_local() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NEW.int_cores_idle < 0 THEN
        RAISE EXCEPTION 'host local doesnt have enough idle cores.';
    ELSIF NEW.int_mem_idle < 0 THEN
        RAISE EXCEPTION 'host local doesnt have enough idle memory';
    ELSIF NEW.int_gpus_idle < 0 THEN
        RAISE EXCEPTION 'host local doesnt have enough GPU idle cores.';
    ELSIF NEW.int_gpu_mem_idle < 0 THEN
        RAISE EXCEPTION 'host local doesnt have enough GPU idle memory.';
    END IF;
    RETURN NEW;
END
$$;
CREATE TRIGGER verify_host_local BEFORE UPDATE ON host_local FOR EACH ROW
    WHEN (NEW.int_cores_max = OLD.int_cores_max AND NEW.int_mem_max = OLD.int_mem_max
          AND NEW.int_gpus_max = OLD.int_gpus_max AND NEW.int_gpu_mem_max = OLD.int_gpu_mem_max
          AND (NEW.int_cores_idle <> OLD.int_cores_idle OR NEW.int_mem_idle <> OLD.int_mem_idle
               OR NEW.int_gpus_idle <> OLD.int_gpus_idle OR NEW.int_gpu_mem_idle <> OLD.int_gpu_mem_idle))
    EXECUTE FUNCTION trigger__verify_host_local();

-- Procs.

CREATE FUNCTION trigger__before_insert_proc() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION 'failed to allocate proc, tried to allocate 0 cores';
END
$$;
CREATE TRIGGER before_insert_proc BEFORE INSERT ON proc FOR EACH ROW
    WHEN (NEW.int_cores_reserved <= 0) EXECUTE FUNCTION trigger__before_insert_proc();

-- A proc that is given more memory takes it from its host.
CREATE FUNCTION trigger__upgrade_proc_memory_usage() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE host SET int_mem_idle = int_mem_idle + OLD.int_mem_reserved - NEW.int_mem_reserved
    WHERE pk_host = NEW.pk_host;
    RETURN NULL;
END
$$;
CREATE TRIGGER upgrade_proc_memory_usage AFTER UPDATE ON proc FOR EACH ROW
    WHEN (NEW.int_mem_reserved <> OLD.int_mem_reserved) EXECUTE FUNCTION trigger__upgrade_proc_memory_usage();

-- A proc that goes on to another layer takes its cores and GPUs along. Highest id first, as Cuebot locks them.
CREATE FUNCTION trigger__update_proc_update_layer() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    layer_id varchar;
BEGIN
    FOR layer_id IN
        SELECT pk_layer FROM layer_resource WHERE pk_layer IN (OLD.pk_layer, NEW.pk_layer) ORDER BY pk_layer DESC
    LOOP
        UPDATE layer_resource
        SET int_cores = int_cores
                + CASE WHEN layer_id = NEW.pk_layer THEN NEW.int_cores_reserved ELSE -OLD.int_cores_reserved END,
            int_gpus = int_gpus
                + CASE WHEN layer_id = NEW.pk_layer THEN NEW.int_gpus_reserved ELSE -OLD.int_gpus_reserved END
        WHERE pk_layer = layer_id;
    END LOOP;
    RETURN NULL;
END
$$;
CREATE TRIGGER update_proc_update_layer AFTER UPDATE ON proc FOR EACH ROW
    WHEN (NEW.pk_layer <> OLD.pk_layer) EXECUTE FUNCTION trigger__update_proc_update_layer();

-- Tiers.

CREATE FUNCTION trigger__tier_folder() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.float_tier := soft_tier(NEW.int_cores, NEW.int_min_cores);
    RETURN NEW;
END
$$;
CREATE TRIGGER tier_folder BEFORE UPDATE ON folder_resource FOR EACH ROW EXECUTE FUNCTION trigger__tier_folder();

CREATE FUNCTION trigger__point_tier() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.float_tier := soft_tier(NEW.int_cores, NEW.int_min_cores);
    RETURN NEW;
END
$$;
CREATE TRIGGER point_tier BEFORE UPDATE ON point FOR EACH ROW EXECUTE FUNCTION trigger__point_tier();

CREATE FUNCTION trigger__tier_job() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.float_tier := tier(NEW.int_cores, NEW.int_min_cores);
    RETURN NEW;
END
$$;
CREATE TRIGGER tier_job BEFORE UPDATE ON job_resource FOR EACH ROW EXECUTE FUNCTION trigger__tier_job();

CREATE FUNCTION trigger__tier_subscription() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.float_tier := tier(NEW.int_cores, NEW.int_size);
    RETURN NEW;
END
$$;
CREATE TRIGGER tier_subscription BEFORE UPDATE ON subscription FOR EACH ROW
    EXECUTE FUNCTION trigger__tier_subscription();

CREATE FUNCTION trigger__tier_host_local() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.float_tier := tier(NEW.int_cores_max - NEW.int_cores_idle, NEW.int_cores_max);
    RETURN NEW;
END
$$;
CREATE TRIGGER tier_host_local BEFORE UPDATE ON host_local FOR EACH ROW EXECUTE FUNCTION trigger__tier_host_local();
