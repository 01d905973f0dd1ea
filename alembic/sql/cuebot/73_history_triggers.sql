-- dt_last_modified of history rows: the day of the last write, by which reports select.

CREATE FUNCTION trigger__tbiu_job_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.dt_last_modified := current_date;
    RETURN NEW;
END
$$;
CREATE TRIGGER tbiu_job_history BEFORE INSERT OR UPDATE ON job_history FOR EACH ROW
    EXECUTE FUNCTION trigger__tbiu_job_history();

CREATE FUNCTION trigger__tbiu_layer_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.dt_last_modified := current_date;
    RETURN NEW;
END
$$;
CREATE TRIGGER tbiu_layer_history BEFORE INSERT OR UPDATE ON layer_history FOR EACH ROW
    EXECUTE FUNCTION trigger__tbiu_layer_history();

CREATE FUNCTION trigger__tbiu_frame_history() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    NEW.dt_last_modified := current_date;
    RETURN NEW;
END
$$;
CREATE TRIGGER tbiu_frame_history BEFORE INSERT OR UPDATE ON frame_history FOR EACH ROW
    EXECUTE FUNCTION trigger__tbiu_frame_history();

-- The open run of a frame is looked up at every start and end.
CREATE INDEX i_frame_history_open ON frame_history (pk_frame) WHERE int_ts_stopped = 0;
