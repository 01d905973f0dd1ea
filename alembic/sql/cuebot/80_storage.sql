-- Room on the pages of the rows that every booking changes in place: no index covers the columns that change, so an
-- update stays on its page as long as there is space.

ALTER TABLE host SET (fillfactor = 80);
ALTER TABLE job_stat SET (fillfactor = 80);
ALTER TABLE job_resource SET (fillfactor = 80);
ALTER TABLE layer_stat SET (fillfactor = 80);
ALTER TABLE layer_resource SET (fillfactor = 80);
ALTER TABLE folder_resource SET (fillfactor = 80);
ALTER TABLE subscription SET (fillfactor = 80);
ALTER TABLE point SET (fillfactor = 80);
