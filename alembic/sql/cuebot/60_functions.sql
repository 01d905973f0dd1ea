-- Functions that Cuebot calls, and the arithmetic of the tier columns.

-- Whole seconds since 1970.
CREATE FUNCTION epoch(moment timestamptz) RETURNS numeric LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT CAST(CAST(extract(epoch FROM moment) AS integer) AS numeric)
$$;

CREATE FUNCTION interval_to_seconds(span interval) RETURNS numeric LANGUAGE sql IMMUTABLE STRICT AS $$
    SELECT CAST(extract(day FROM span) * 86400 + extract(hour FROM span) * 3600
                + extract(minute FROM span) * 60 + extract(second FROM span) AS numeric)
$$;

-- Seconds between two moments; still running counts until now, never started is 0.
CREATE FUNCTION find_duration(started timestamptz, stopped timestamptz) RETURNS numeric LANGUAGE sql STABLE AS $$
    SELECT coalesce(round(CAST(extract(epoch FROM coalesce(stopped, now()) - started) AS numeric)), 0)
$$;

-- How well a job or subscription is served: use over what it is due. Nothing used sorts by how much is due.
CREATE FUNCTION tier(used numeric, due numeric) RETURNS numeric LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN due = 0 THEN used / 100 + 1
                WHEN used = 0 THEN -due
                ELSE used / due END
$$;

-- The same where being served in full is all there is to reach.
CREATE FUNCTION soft_tier(used numeric, due numeric) RETURNS numeric LANGUAGE sql IMMUTABLE AS $$
    SELECT CASE WHEN used IS NULL THEN 0
                WHEN due = 0 OR used >= due THEN 1
                WHEN used = 0 THEN -due
                ELSE used / due END
$$;

-- Rewrite host.str_tags from host_tag, by kind of tag and then name. The column holds 128 characters for people to
-- read: tags that no longer fit are left out of it whole (placement reads host_tag).
CREATE FUNCTION recalculate_tags(host_id varchar) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    shown varchar := '';
    next_tag varchar;
BEGIN
    FOR next_tag IN SELECT str_tag FROM host_tag WHERE pk_host = host_id ORDER BY str_tag_type, str_tag LOOP
        EXIT WHEN length(shown) + 1 + length(next_tag) > 129;
        shown := shown || ' ' || next_tag;
    END LOOP;
    UPDATE host SET str_tags = trim(shown) WHERE pk_host = host_id;
END
$$;

-- Set the use of every subscription of an unmanaged show to what its procs hold. Shows managed by this scheduler are
-- left to its own recompute. The rows are locked before the procs are summed, and a burst below the true use is lifted
-- for the one statement that would otherwise be refused.
CREATE FUNCTION recalculate_subs() RETURNS void LANGUAGE plpgsql AS $$
DECLARE
    sub RECORD;
    quiet varchar := coalesce(current_setting('opencue_sched.quiet_caps', true), '');
BEGIN
    PERFORM set_config('opencue_sched.quiet_caps', 'on', true);
    PERFORM 1 FROM subscription
    WHERE pk_show IN (SELECT pk_show FROM show WHERE NOT b_scheduler_managed)
    ORDER BY pk_subscription
    FOR NO KEY UPDATE;
    FOR sub IN
        WITH held AS (
            SELECT p.pk_show, h.pk_alloc, sum(p.int_cores_reserved) AS cores, sum(p.int_gpus_reserved) AS gpus
            FROM proc p
            JOIN host h ON h.pk_host = p.pk_host
            WHERE NOT p.b_local
            GROUP BY p.pk_show, h.pk_alloc
        )
        SELECT s.pk_subscription, s.int_burst, coalesce(held.cores, 0) AS cores, coalesce(held.gpus, 0) AS gpus
        FROM subscription s
        JOIN show ON show.pk_show = s.pk_show AND NOT show.b_scheduler_managed
        LEFT JOIN held ON held.pk_show = s.pk_show AND held.pk_alloc = s.pk_alloc
        WHERE s.int_cores <> coalesce(held.cores, 0) OR s.int_gpus <> coalesce(held.gpus, 0)
        ORDER BY s.pk_subscription
    LOOP
        UPDATE subscription SET int_burst = greatest(sub.int_burst, sub.cores)
        WHERE pk_subscription = sub.pk_subscription AND int_burst < sub.cores;
        UPDATE subscription SET int_cores = sub.cores, int_gpus = sub.gpus WHERE pk_subscription = sub.pk_subscription;
        UPDATE subscription SET int_burst = sub.int_burst
        WHERE pk_subscription = sub.pk_subscription AND int_burst <> sub.int_burst;
    END LOOP;
    PERFORM set_config('opencue_sched.quiet_caps', quiet, true);
END
$$;

-- A folder moved below another: its level and that of everything below it.
CREATE FUNCTION recurse_folder_parent_change(folder_id varchar, parent_id varchar) RETURNS void LANGUAGE sql AS $$
    WITH RECURSIVE below (pk_folder, int_level) AS (
        SELECT folder_id, int_level + 1 FROM folder_level WHERE pk_folder = parent_id
        UNION ALL
        SELECT f.pk_folder, below.int_level + 1 FROM folder f JOIN below ON f.pk_parent_folder = below.pk_folder
    )
    UPDATE folder_level l SET int_level = below.int_level FROM below WHERE l.pk_folder = below.pk_folder
$$;

-- Number the filters of a show 1, 2, 3 ... in their present order.
CREATE FUNCTION reorder_filters(show_id varchar) RETURNS void LANGUAGE sql AS $$
    UPDATE filter f SET f_order = ranked.place
    FROM (SELECT pk_filter, row_number() OVER (ORDER BY f_order) AS place FROM filter WHERE pk_show = show_id) ranked
    WHERE f.pk_filter = ranked.pk_filter
$$;
