"""An RQD of a test's own, alone or before another one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import grpc
from opencue_proto import rqd_pb2_grpc


@contextmanager
def served_rqd(rqd: rqd_pb2_grpc.RqdInterfaceServicer) -> Iterator[str]:
    """Serve an RQD; its address."""
    server = grpc.server(ThreadPoolExecutor(2))
    rqd_pb2_grpc.add_RqdInterfaceServicer_to_server(rqd, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        server.stop(0).wait()


@contextmanager
def rqd_before(
    address: str, make: Callable[[rqd_pb2_grpc.RqdInterfaceStub], rqd_pb2_grpc.RqdInterfaceServicer]
) -> Iterator[str]:
    """Serve the RQD that ``make`` puts before the one at ``address``; its own address."""
    with grpc.insecure_channel(address) as channel, served_rqd(make(rqd_pb2_grpc.RqdInterfaceStub(channel))) as own:
        yield own
