"""A connection to an address that is gone: two network namespaces, with a real kernel between them."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

CAN_MAKE_NAMESPACES = os.geteuid() == 0 and shutil.which("ip") is not None

_RQD = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import grpc
from opencue_proto import rqd_pb2, rqd_pb2_grpc

class Rqd(rqd_pb2_grpc.RqdInterfaceServicer):
    def ReportStatus(self, request, context):
        return rqd_pb2.RqdStaticReportStatusResponse()

    def KillRunningFrame(self, request, context):
        return rqd_pb2.RqdStaticKillRunningFrameResponse()

server = grpc.server(ThreadPoolExecutor(4))
rqd_pb2_grpc.add_RqdInterfaceServicer_to_server(Rqd(), server)
server.add_insecure_port("10.55.0.2:8444")
server.start()
print("serving", flush=True)
sys.stdin.readline()
"""
_CALLER = """
import sys
import grpc
from opencue_proto import rqd_pb2
from opencue_sched.rqd.channels import RqdChannels
from opencue_sched.settings import Rqd

with RqdChannels(Rqd(timeout=20.0)) as channels:
    stub = channels.stub("10.55.0.2")
    stub.ReportStatus(rqd_pb2.RqdStaticReportStatusRequest(), timeout=20.0, wait_for_ready=True)
    print("connected", flush=True)
    sys.stdin.readline()
    try:
        stub.KillRunningFrame(rqd_pb2.RqdStaticKillRunningFrameRequest(), timeout=90.0)
        print("OK", flush=True)
    except grpc.RpcError as error:
        print(error.code().name, flush=True)
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def started(stack: ExitStack, namespace: str, program: str) -> subprocess.Popen[str]:
    """A program in a namespace, which has said its first word."""
    process = stack.enter_context(
        subprocess.Popen(
            ["ip", "netns", "exec", namespace, sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
    )
    stack.callback(process.kill)
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


@pytest.fixture
def caller() -> Iterator[tuple[subprocess.Popen[str], Callable[[], None]]]:
    """A process with a connection to an RQD at 10.55.0.2, and what takes that address away."""
    host, here, tag = (f"{name}-{uuid.uuid4().hex[:6]}" for name in ("host", "here", "t"))
    near, far = f"{tag}a", f"{tag}b"
    with ExitStack() as stack:
        for namespace in (host, here):
            ip("netns", "add", namespace)
            stack.callback(ip, "netns", "delete", namespace)
            ip("-n", namespace, "link", "set", "lo", "up")
        ip("link", "add", near, "netns", here, "type", "veth", "peer", "name", far, "netns", host)
        for namespace, link, address in ((here, near, "10.55.0.1/24"), (host, far, "10.55.0.2/24")):
            ip("-n", namespace, "addr", "add", address, "dev", link)
            ip("-n", namespace, "link", "set", link, "up")
        started(stack, host, _RQD)

        def take_address_away() -> None:
            ip("-n", host, "addr", "del", "10.55.0.2/24", "dev", far)

        yield started(stack, here, _CALLER), take_address_away


@pytest.mark.skipif(not CAN_MAKE_NAMESPACES, reason="network namespaces need root and iproute2")
def test_a_call_to_an_address_that_is_gone_ends_when_the_kernel_gives_up_and_not_with_its_deadline(
    caller: tuple[subprocess.Popen[str], Callable[[], None]],
) -> None:
    # given an open connection to an address that is taken away: nobody resets it
    process, take_address_away = caller
    take_address_away()
    # when a call has far more time than the keepalive's time-out
    said, _ = process.communicate("go on\n", timeout=120)
    # then the connection is given up before: the next one asks for the name again
    assert said.split() == ["UNAVAILABLE"]
