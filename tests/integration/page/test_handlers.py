"""What viewers of the farm page ask of the stores."""

from __future__ import annotations

import asyncio
import gzip
import json

from pydantic import SecretStr

from opencue_sched.embedded.farms.farm import Farm
from opencue_sched.embedded.farms.farm_specs import LayerSpec
from opencue_sched.page.handlers import FarmReader
from tests.kit.polling import eventually
from tests.kit.wording import lacks


def test_viewers_share_one_read_a_second_and_get_the_next_one_after_it(engine, redis_client, settings):
    with engine.begin() as connection:
        farm = Farm(connection)
        farm.host(name="node1", cores=8, idle_cores=2, lock="LOCKED")
        farm.host(name="node2", state="DOWN")
        farm.job(layers=[LayerSpec(frames=3)], name="a-job")
    reader = FarmReader(settings)

    async def watch() -> None:
        # when many ask at once, and one a moment later, then all have the same answer
        answers = await asyncio.gather(*(reader.answer() for _ in range(50)), reader.answer())
        first = answers[0]
        assert all(answer is first for answer in answers)
        assert await reader.answer() is first
        assert first.status == 200
        told = json.loads(gzip.decompress(first.body))
        assert [job["name"] for job in told["jobs"]] == ["a-job"]
        figures = [(it["name"], it["look"], it["cores"], it["booked"]) for it in told["grid"]]
        assert figures == [("node1", "locked", 8, 6), ("node2", "down", 8, 0)]
        assert not lacks(told["grid"][0]["words"], "node1", "locked", "6 of 8 cores", "0 frames")
        # and each job has an answer of its own
        asked = await asyncio.gather(*(reader.answer(f"job {number}") for number in range(3)))
        assert [answer.status for answer in asked] == [404, 404, 404]

    asyncio.run(watch())
    before = asyncio.run(reader.answer())
    eventually(lambda: asyncio.run(reader.answer()) is not before, 10, "the next read")


def test_a_redis_that_is_away_is_an_answer_without_its_password(engine, settings):
    away = settings.model_copy(update={"redis_url": SecretStr("redis://:secret@127.0.0.1:1/0")})
    reader = FarmReader(away)
    answer = asyncio.run(reader.answer())
    assert answer.status == 503
    said = json.loads(gzip.decompress(answer.body))["error"]
    assert "redis://127.0.0.1:1/0" in said
    assert "secret" not in said
