-- opencue_sched_caps: {"vertices": ["bound:{layer}", ...]}. A layer has got or lost a limit while frames of it run: these
-- count under other limits now. A layer that is being submitted has none, so it is not named.
CREATE FUNCTION opencue_sched_bound() RETURNS trigger LANGUAGE plpgsql AS $$
DECLARE
    changed text[];
BEGIN
    SELECT array_agg('bound:' || bound.pk_layer) INTO changed
    FROM bound JOIN layer_stat ON layer_stat.pk_layer = bound.pk_layer AND layer_stat.int_running_count > 0;
    IF changed IS NOT NULL THEN
        PERFORM opencue_sched_notify('opencue_sched_caps', 'vertices', changed);
    END IF;
    RETURN NULL;
END
$$;
CREATE TRIGGER opencue_sched_bound_insert AFTER INSERT ON layer_limit REFERENCING NEW TABLE AS bound
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_bound();
CREATE TRIGGER opencue_sched_bound_delete AFTER DELETE ON layer_limit REFERENCING OLD TABLE AS bound
    FOR EACH STATEMENT EXECUTE FUNCTION opencue_sched_bound();
