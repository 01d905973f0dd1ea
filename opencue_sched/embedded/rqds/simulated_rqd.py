"""A farm of simulated RQDs: real gRPC servers that "run" frames by waiting, with faults that can be switched on.

As a library, ``SimulatedFarm`` is a context manager whose methods may be called from any thread. As a program::

    python -m opencue_sched.embedded.rqds.simulated_rqd --hosts 50 --report 127.0.0.1:8443 --run-seconds 0.5 2

prints one JSON line, host name -> address (ready for OPENCUE_SCHED_RQD__ADDRESSES), runs until SIGTERM or Ctrl-C and
then prints what ran.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import Coroutine, Sequence
from dataclasses import asdict, replace
from typing import Any, Self, TypeVar

import grpc
import structlog
from opencue_proto import host_pb2, report_pb2, report_pb2_grpc, rqd_pb2, rqd_pb2_grpc

from opencue_sched.embedded.rqds.simulated_host import (
    Answer,
    Behaviour,
    FrameRun,
    HostSpec,
    SimulatedHost,
    SimulatedRefusal,
)
from opencue_sched.embedded.servers.processes import Startable, free_port

log = structlog.get_logger(__name__)

_Result = TypeVar("_Result")
_CALL_SECONDS = 30.0
"""How long a call from another thread into the event loop may take."""
_REPORT_SECONDS = 10.0
"""How long a report may take."""
_REPORT_ATTEMPTS = 4
"""How often a report is sent to a service that is not there."""
_FIRST_RETRY_SECONDS = 0.1
"""The pause before a report is sent for the second time."""
_REFUSAL_PREFIX = "Exception calling application: "


class SimulatedFarm(Startable):
    """Many simulated hosts in this process, each at an address of its own. Start it after any fork.

    ``report_address`` is a RqdReportInterface (boot, status every ``report_seconds``, completions), or empty for none.
    ``port`` 0 gives every host a free port on 127.0.0.1; another value gives host number n the address
    127.1.x.y:``port``, so that the port may be the same for all.
    """

    def __init__(
        self,
        hosts: Sequence[HostSpec],
        *,
        behaviour: Behaviour | None = None,
        report_address: str = "",
        report_seconds: tuple[float, float] = (5.0, 30.0),
        port: int = 0,
        seed: int = 1,
    ) -> None:
        self.specs = tuple(hosts)
        self.report_address = report_address
        self.report_seconds = report_seconds
        self.rng = random.Random(seed)
        self.reports: Any = None
        self._behaviour = behaviour or Behaviour()
        self._port = port
        self._served: dict[str, _ServedHost] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="simulated-rqd", daemon=True)
        self._channel: Any = None

    @property
    def addresses(self) -> dict[str, str]:
        """host name -> address:port, as settings.rqd.addresses wants it."""
        return {name: served.address for name, served in self._served.items()}

    def start(self) -> Self:
        self._thread.start()
        self._call(self._start())
        return self

    def stop(self) -> None:
        """Stop every server. Frames that still run end as crashed."""
        if self._loop.is_closed():
            return
        self._call(self._stop())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def host(self, name: str) -> SimulatedHost:
        """The host itself: read its figures; change it only through the methods of this class."""
        return self._served[name].host

    def behave(self, host_name: str | None = None, **changes: Any) -> None:
        """Change fields of Behaviour on one host, or on all."""

        def change() -> None:
            for name, served in self._served.items():
                if host_name in (None, name):
                    served.host.behaviour = replace(served.host.behaviour, **changes)

        self._call(_as_coroutine(change))

    def freeze(self, host_name: str) -> None:
        """Have a host accept connections and answer nothing; calls that it got are carried out after thaw()."""
        self._call(_as_coroutine(self._served[host_name].gate.clear))

    def thaw(self, host_name: str) -> None:
        """Have a frozen host answer again."""
        self._call(_as_coroutine(self._served[host_name].gate.set))

    def crash(self, host_name: str) -> None:
        """Cut a host's power: its port closes, its frames are gone, nothing is reported."""
        self._call(self._served[host_name].crash())

    def restart(self, host_name: str) -> None:
        """Boot a crashed or stopped host again, at its old address."""
        self._call(self._served[host_name].start())

    def finish(self, host_name: str, frame_id: str, exit_status: int = 0, exit_signal: int = 0) -> bool:
        """End a running frame now."""
        host = self._served[host_name].host
        return bool(self._call(_as_coroutine(lambda: host.finish(frame_id, exit_status, exit_signal))))

    def report_now(self, host_name: str) -> bool:
        """Send a status report at once; True when it was accepted."""
        return self._call(self._served[host_name].report_status())

    def calls(self, host_name: str) -> Counter[str]:
        """How often each method of a host was called."""
        return Counter(self._served[host_name].calls)

    def running(self) -> dict[str, str]:
        """frame id -> host name of everything that holds cores at this moment."""

        def collect() -> dict[str, str]:
            return {frame_id: name for name, served in self._served.items() for frame_id in served.host.frame_ids}

        return self._call(_as_coroutine(collect))

    def runs(self, frame_id: str | None = None) -> list[FrameRun]:
        """Copies of every run so far (of one frame), by start."""

        def collect() -> list[FrameRun]:
            every = (run for served in self._served.values() for run in served.host.runs)
            return sorted(
                (replace(run) for run in every if frame_id in (None, run.frame_id)), key=lambda run: run.started
            )

        return self._call(_as_coroutine(collect))

    def overlaps(self) -> list[tuple[FrameRun, FrameRun]]:
        """Runs of one frame that overlapped in time: a frame rendered twice at once."""
        found: list[tuple[FrameRun, FrameRun]] = []
        latest: dict[str, FrameRun] = {}
        for run in self.runs():
            before = latest.get(run.frame_id)
            if before is not None and (before.ended is None or before.ended > run.started):
                found.append((before, run))
            if before is None or before.ended is None or (run.ended or float("inf")) > before.ended:
                latest[run.frame_id] = run
        return found

    def violations(self) -> list[str]:
        """What a real RQD would have been damaged by."""
        return [text for served in self._served.values() for text in served.host.violations]

    async def _start(self) -> None:
        """Begin to serve all hosts, each at an address of its own. Called in the event loop."""
        if self.report_address:
            self._channel = grpc.aio.insecure_channel(self.report_address, options=[("grpc.enable_http_proxy", 0)])
            self.reports = report_pb2_grpc.RqdReportInterfaceStub(self._channel)
        for number, spec in enumerate(self.specs):
            host = SimulatedHost(spec, self._behaviour, rng=self.rng)
            served = self._served[spec.name] = _ServedHost(host, self._address(number), self)
            await served.start()

    async def _stop(self) -> None:
        """Crash all hosts, and end what else runs in the event loop."""
        for served in self._served.values():
            await served.crash()
        if self._channel is not None:
            await self._channel.close()
        others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    def _address(self, number: int) -> str:
        if not self._port:
            return f"127.0.0.1:{free_port()}"
        return f"127.1.{(number + 1) // 256}.{(number + 1) % 256}:{self._port}"

    def _call(self, coroutine: Coroutine[Any, Any, _Result]) -> _Result:
        """What the coroutine returns, run in the event loop for another thread. Raises TimeoutError after
        _CALL_SECONDS."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(_CALL_SECONDS)


class _Servicer(rqd_pb2_grpc.RqdInterfaceServicer):  # type: ignore[misc]
    """RqdInterface of one host. While `gate` is cleared, calls wait as they would before a frozen process."""

    def __init__(self, served: _ServedHost) -> None:
        self._served = served
        self._host = served.host

    async def LaunchFrame(self, request: Any, context: Any) -> Any:  # noqa: N802
        refusal = await asyncio.shield(asyncio.ensure_future(self._launch(request.run_frame)))
        if refusal:
            await context.abort(grpc.StatusCode.UNKNOWN, f"{_REFUSAL_PREFIX}{refusal}")
        answer = self._host.behaviour.launch_answer
        if answer is Answer.CUT_OFF:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
        if answer is Answer.NEVER:
            await asyncio.Event().wait()
        return rqd_pb2.RqdStaticLaunchFrameResponse()

    async def _launch(self, frame: Any) -> str:
        """Launch a frame, to the end even when the caller gives up, as in a process that was frozen for a while."""
        await self._served.gate.wait()
        self._served.calls["LaunchFrame"] += 1
        await asyncio.sleep(self._host.behaviour.accept_seconds)
        try:
            self._host.launch(frame)
        except SimulatedRefusal as refusal:
            return str(refusal)
        return ""

    async def KillRunningFrame(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._passed("KillRunningFrame")
        if not request.message:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, "Could not kill frame without a reason")
        if not self._host.kill(request.frame_id):
            await context.abort(
                grpc.StatusCode.NOT_FOUND, f"The requested frame to kill was not found. frameId: {request.frame_id}"
            )
        return rqd_pb2.RqdStaticKillRunningFrameResponse()

    async def ReportStatus(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("ReportStatus")
        return rqd_pb2.RqdStaticReportStatusResponse(host_report=self._host.host_report())

    async def _passed(self, name: str) -> None:
        """Wait while the host is frozen, then count the call."""
        await self._served.gate.wait()
        self._served.calls[name] += 1


class _ServedHost:
    """A host, its gRPC server and its reports. Used inside the event loop only."""

    def __init__(self, host: SimulatedHost, address: str, farm: SimulatedFarm) -> None:
        self.host = host
        self.address = address
        self.gate = asyncio.Event()
        self.gate.set()
        self.calls: Counter[str] = Counter()
        self._farm = farm
        self._server: Any = None
        self._tasks: set[asyncio.Task[None]] = set()
        host.on_end = self._completed

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        rqd_pb2_grpc.add_RqdInterfaceServicer_to_server(_Servicer(self), self._server)
        self._server.add_insecure_port(self.address)
        await self._server.start()
        self.host.state = host_pb2.UP
        if self._farm.report_address:
            task = asyncio.get_running_loop().create_task(self._report_for_ever())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def crash(self) -> None:
        self.host.crash()
        await self.stop()

    async def report_status(self) -> bool:
        request = report_pb2.RqdReportStatusRequest(host_report=self.host.host_report())
        return await self._send("ReportStatus", request)

    async def _report_for_ever(self) -> None:
        """Report the start, and then the host again and again, after times between the two of ``report_seconds``."""
        boot = report_pb2.RqdReportRqdStartupRequest(boot_report=self.host.boot_report())
        await self._send("ReportRqdStartup", boot)
        shortest, longest = self._farm.report_seconds
        while longest > 0:
            await asyncio.sleep(self._farm.rng.uniform(shortest, longest))
            await self.gate.wait()
            await self.report_status()

    async def _completed(self, run: FrameRun, frame: Any) -> None:
        """Report the end of a frame, where anybody is to hear of it; the run says whether that was delivered."""
        if not self._farm.report_address or self.host.behaviour.completions_lost:
            run.completion_delivered = False
            return
        await self.gate.wait()
        report = report_pb2.FrameCompleteReport(
            host=self.host.render_host(),
            frame=self.host.running_info(frame),
            exit_status=run.exit_status or 0,
            exit_signal=run.exit_signal,
            run_time=int((run.ended or run.started) - run.started),
        )
        request = report_pb2.RqdReportRunningFrameCompletionRequest(frame_complete_report=report)
        run.completion_delivered = await self._send("ReportRunningFrameCompletion", request)

    async def _send(self, method: str, request: Any) -> bool:
        """RQD's own retries: four attempts when nobody listens, then the report is lost for good."""
        for attempt in range(_REPORT_ATTEMPTS):
            try:
                await getattr(self._farm.reports, method)(request, timeout=_REPORT_SECONDS)
            except grpc.aio.AioRpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE or attempt == _REPORT_ATTEMPTS - 1:
                    log.warning(
                        "simulated_report_lost", host=self.host.spec.name, report=method, code=error.code().name
                    )
                    return False
                await asyncio.sleep(_FIRST_RETRY_SECONDS * 2**attempt)
            else:
                return True
        return False


async def _as_coroutine(function: Any) -> Any:
    return function()


def host_specs(count: int, *, prefix: str = "sim", **fields: Any) -> list[HostSpec]:
    """``count`` hosts named prefix0001, prefix0002, ... with the given HostSpec fields."""
    return [HostSpec(name=f"{prefix}{number:04d}", **fields) for number in range(1, count + 1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a simulated farm until SIGTERM or SIGINT."""
    parser = argparse.ArgumentParser(prog="simulated_rqd", description="A farm of simulated RQDs")
    parser.add_argument("--hosts", type=int, default=10, help="number of hosts")
    parser.add_argument("--cores", type=int, default=16, help="cores of each host")
    parser.add_argument("--memory-gb", type=int, default=64, help="memory of each host, GiB")
    parser.add_argument("--tags", nargs="*", default=[], help="tags of each host")
    parser.add_argument("--report", default="", metavar="ADDRESS:PORT", help="report service; none when left out")
    parser.add_argument("--report-seconds", nargs=2, type=float, default=[5.0, 30.0], metavar=("MIN", "MAX"))
    parser.add_argument("--port", type=int, default=0, help="one port for all at 127.1.x.y; 0: free ports")
    parser.add_argument("--run-seconds", nargs=2, type=float, default=[0.05, 0.2], metavar=("MIN", "MAX"))
    parser.add_argument("--failure-ratio", type=float, default=0.0)
    parser.add_argument("--hang-ratio", type=float, default=0.0)
    parser.add_argument("--runs", action="store_true", help="print every run at the end, one JSON object a line")
    given = parser.parse_args(arguments)
    specs = host_specs(
        given.hosts,
        cores=given.cores,
        memory_kb=given.memory_gb * 1024 * 1024,
        tags=tuple(given.tags),
    )
    behaviour = Behaviour(
        run_seconds=tuple(given.run_seconds), failure_ratio=given.failure_ratio, hang_ratio=given.hang_ratio
    )
    farm = SimulatedFarm(
        specs,
        behaviour=behaviour,
        report_address=given.report,
        report_seconds=tuple(given.report_seconds),
        port=given.port,
    )
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    with farm:
        _say(farm.addresses)
        signal.sigwait({signal.SIGTERM, signal.SIGINT})
        runs = farm.runs()
        for run in runs if given.runs else ():
            _say(asdict(run))
        ended = Counter(str(run.exit_status) for run in runs)
        _say({"runs": len(runs), "by_exit_status": ended, "overlaps": len(farm.overlaps())})
    return 0


def _say(value: Any) -> None:
    sys.stdout.write(json.dumps(value) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
