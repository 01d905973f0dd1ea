"""What a Cuebot does to the counters, in a process of its own: it ends runs and publishes what they gave back.

    python -m tests.chaos.cuebot_double DATABASE_URL REDIS_URL

Each line of standard input is a JSON object ``{"release": so many, "lost": true}``; ``lost`` says nothing of them to
anybody. The answer is a line with what was ``released``, and the ``violations`` that were ever seen: a vertex above its
cap that holds more than at the last look. It looks before each release, so nothing that is booked in between goes
unseen; and once when there is nothing to release.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import psycopg2
import redis

from tests.kit.cuebot_publish import PUBLISH

VICTIM = """
SELECT proc.pk_proc, frame.pk_frame, proc.pk_host, proc.pk_show, host.pk_alloc, job.pk_folder, proc.pk_job,
       proc.pk_layer, job.pk_dept, proc.int_cores_reserved / 100, proc.int_gpus_reserved
  FROM frame JOIN proc USING (pk_frame) JOIN host USING (pk_host) JOIN job ON job.pk_job = proc.pk_job
 WHERE frame.str_state = 'RUNNING'
 ORDER BY proc.ts_booked LIMIT 1 FOR NO KEY UPDATE OF frame SKIP LOCKED
"""
DELETE = "DELETE FROM proc WHERE pk_proc = %s RETURNING int_cores_reserved, int_mem_reserved"
RESTORE = "UPDATE host SET int_cores_idle = int_cores_idle + %s, int_mem_idle = int_mem_idle + %s WHERE pk_host = %s"
SUCCEED = """
UPDATE frame SET str_state = 'SUCCEEDED', int_exit_status = 0, ts_stopped = now(), ts_updated = now(),
       int_version = int_version + 1 WHERE pk_frame = %s
"""
HELD = """
WITH run AS (SELECT proc.int_cores_reserved AS cores, proc.pk_show, host.pk_alloc, job.pk_folder
               FROM proc JOIN host USING (pk_host) JOIN job ON job.pk_job = proc.pk_job)
SELECT 'sub:' || pk_show || ':' || pk_alloc, CAST(sum(cores) AS int), CAST(min(int_burst) AS int)
  FROM run JOIN subscription USING (pk_show, pk_alloc) GROUP BY pk_show, pk_alloc
UNION ALL
SELECT 'folder:' || pk_folder, CAST(sum(cores) AS int), min(int_max_cores)
  FROM run JOIN folder_resource USING (pk_folder) WHERE int_max_cores > 0 GROUP BY pk_folder
"""
PATIENCE_SECONDS = 60.0


class Double:
    """Publishes decrements, as the feed cuebot-redis expects."""

    def __init__(self, database_url: str, redis_url: str) -> None:
        self.connection = psycopg2.connect(database_url.replace("+psycopg2", ""))
        self.client = redis.Redis.from_url(redis_url)
        self.held: dict[str, int] = {}
        self.violations: list[str] = []

    def look(self, cursor: Any) -> None:
        cursor.execute(HELD)
        seen = {vertex: (held, cap) for vertex, held, cap in cursor.fetchall()}
        for vertex, (held, cap) in seen.items():
            if held > cap and held > self.held.get(vertex, 0):
                self.violations.append(f"{held} at {vertex}, whose cap is {cap}")
        self.held = {vertex: held for vertex, (held, _) in seen.items()}

    def release(self, lost: bool) -> bool:
        """End one run; False when there is none."""
        with self.connection, self.connection.cursor() as cursor:
            self.look(cursor)
            cursor.execute(VICTIM)
            victim = cursor.fetchone()
            if victim is None:
                return False
            proc, frame, host, *vertices, cores, gpus = victim
            cursor.execute(DELETE, (proc,))
            ((centicores, memory),) = cursor.fetchall()
            cursor.execute(RESTORE, (centicores, memory, host))
            cursor.execute(SUCCEED, (frame,))
            self.held = {vertex: held - centicores for vertex, held in self.held.items()}
        if not lost:
            self.publish(*vertices, cores, gpus)
        return True

    def publish(self, show: str, alloc: str, folder: str, job: str, layer: str, dept: str, *amounts: int) -> None:
        keys = [f"sub:{show}:{alloc}", f"folder:{folder}", f"job:{job}", f"layer:{layer}", f"point:{dept}:{show}"]
        self.client.eval(PUBLISH, 6, *(f"acct:{key}" for key in (*keys, "seq")), *(-amount for amount in amounts))


def main() -> None:
    double = Double(*sys.argv[1:])
    for line in sys.stdin:
        order = json.loads(line)
        released, deadline = 0, time.monotonic() + PATIENCE_SECONDS
        while released < order["release"] and time.monotonic() < deadline:
            if double.release(bool(order.get("lost"))):
                released += 1
            else:
                time.sleep(0.01)
        with double.connection, double.connection.cursor() as cursor:
            double.look(cursor)
        print(json.dumps({"released": released, "violations": double.violations}), flush=True)


if __name__ == "__main__":
    main()
