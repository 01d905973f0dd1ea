"""Calls that the reports benchmark writes as HTTP/2 itself, received by a server of gRPC."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any

import grpc
import pytest

from benchmarks.rqd_calls import Calls, RqdCall, RqdConnections

PATH = "/tests.Rqd/Tell"


@dataclass
class Service:
    """A server that notes what it is told, with the most calls that it had at once, and refuses ``refused``."""

    port: int = 0
    refused: bytes = b"refuse this"
    told: list[tuple[str, bytes]] = field(default_factory=list)
    under_way: int = 0
    most_at_once: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def tell(self, message: bytes, context: Any) -> bytes:
        with self.lock:
            self.told.append((context.peer(), message))
            self.under_way += 1
            self.most_at_once = max(self.most_at_once, self.under_way)
        if message == self.refused:
            context.abort(grpc.StatusCode.INVALID_ARGUMENT, "as asked")
        with self.lock:
            self.under_way -= 1
        return b""


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service()
    server = grpc.server(ThreadPoolExecutor(8))
    handler = grpc.unary_unary_rpc_method_handler(made.tell)
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("tests.Rqd", {"Tell": handler}),))
    made.port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield made
    server.stop(None)


def messages(*contents: bytes, connections: int) -> Iterator[RqdCall]:
    return (RqdCall(number % connections, PATH, content) for number, content in enumerate(contents))


def test_each_message_arrives_once_by_the_connection_of_its_rqd(service: Service) -> None:
    contents = [b"%05d" % number * 100 for number in range(300)]
    calls = Calls(messages(*contents, connections=3), at_once=16)
    with closing(RqdConnections(service.port, 3)) as connections:
        connections.send(calls)
    assert calls.over and len(calls.answers) == 300
    assert sorted(message for _, message in service.told) == contents
    of_each = [{message for peer, message in service.told if peer == wanted} for wanted in {p for p, _ in service.told}]
    assert sorted(map(sorted, of_each)) == sorted(contents[number::3] for number in range(3))


def test_no_more_wait_for_an_answer_than_may(service: Service) -> None:
    calls = Calls(messages(*[b"report"] * 200, connections=50), at_once=2)
    with closing(RqdConnections(service.port, 50)) as connections:
        connections.send(calls)
    assert len(service.told) == 200
    assert service.most_at_once <= 2


def test_flows_are_sent_side_by_side_each_to_its_end(service: Service) -> None:
    slow = Calls(messages(*[b"slow"] * 20, connections=1), at_once=4, rate=200)
    rest = Calls(messages(*[b"fast"] * 500, connections=2), at_once=4)
    with closing(RqdConnections(service.port, 2)) as connections:
        connections.send(slow, rest)
    assert (len(slow.answers), len(rest.answers)) == (20, 500)
    # The first of each came before the last of the other.
    order = [message for _, message in service.told]
    assert order.index(b"slow") < len(order) - 1 - order[::-1].index(b"fast")


def test_more_than_a_connection_may_carry_at_first_is_sent_when_the_service_has_read_that(service: Service) -> None:
    calls = Calls(messages(*[b"x" * 10_000] * 40, connections=1), at_once=20)
    with closing(RqdConnections(service.port, 1)) as connections:
        connections.send(calls)
    assert len(service.told) == 40


def test_a_refused_call_fails_the_benchmark(service: Service) -> None:
    calls = Calls(messages(b"fine", service.refused, connections=1), at_once=1)
    with closing(RqdConnections(service.port, 1)) as connections, pytest.raises(AssertionError, match="refused a call"):
        connections.send(calls)
