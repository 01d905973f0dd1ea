"""RqdInterface of one simulated host, and the reports it sends. Everything here runs in one event loop."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Coroutine
from typing import Any, Protocol

import grpc
import structlog
from opencue_proto import host_pb2, report_pb2, rqd_pb2, rqd_pb2_grpc

from opencue_sched.domain.units import centicores
from opencue_sched.embedded.simulated_host import Answer, FrameRun, Refused, SimulatedHost

log = structlog.get_logger(__name__)

_REPORT_SECONDS = 10.0
_REPORT_ATTEMPTS = 4
_FIRST_RETRY_SECONDS = 0.1
_REFUSAL_PREFIX = "Exception calling application: "


class Surroundings(Protocol):
    """What a host needs of its farm. ``reports`` is a RqdReportInterface stub, used when there is an address."""

    report_address: str
    report_seconds: tuple[float, float]
    rng: random.Random
    reports: Any

    def spawn(self, coroutine: Coroutine[Any, Any, None]) -> None: ...


class _Servicer(rqd_pb2_grpc.RqdInterfaceServicer):  # type: ignore[misc]
    """RqdInterface of one host. While `gate` is cleared, calls wait as they would before a frozen process."""

    def __init__(self, served: ServedHost) -> None:
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
        """Carried out to its end even when the caller gives up, as in a process that was frozen for a while."""
        await self._served.gate.wait()
        self._served.calls["LaunchFrame"] += 1
        await asyncio.sleep(self._host.behaviour.accept_seconds)
        try:
            self._host.launch(frame)
        except Refused as refusal:
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

    async def GetRunningFrameStatus(self, request: Any, context: Any) -> Any:  # noqa: N802
        await self._passed("GetRunningFrameStatus")
        frame = self._host.listed(request.frame_id)
        if frame is None:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"Could not find frame with id {request.frame_id}")
        return rqd_pb2.RqdStaticGetRunningFrameStatusResponse(running_frame_info=self._host.running_info(frame))

    async def Lock(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("Lock")
        total = centicores(self._host.spec.cores)
        self._host.locked_centicores = min(total, self._host.locked_centicores + request.cores)
        return rqd_pb2.RqdStaticLockResponse()

    async def LockAll(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("LockAll")
        self._host.locked_centicores = centicores(self._host.spec.cores)
        return rqd_pb2.RqdStaticLockAllResponse()

    async def Unlock(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("Unlock")
        self._host.locked_centicores = max(0, self._host.locked_centicores - request.cores)
        return rqd_pb2.RqdStaticUnlockResponse()

    async def UnlockAll(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("UnlockAll")
        self._host.locked_centicores = 0
        return rqd_pb2.RqdStaticUnlockAllResponse()

    async def NimbyOn(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("NimbyOn")
        self._host.nimby_locked = True
        self._host.kill_all()
        return rqd_pb2.RqdStaticNimbyOnResponse()

    async def NimbyOff(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("NimbyOff")
        self._host.nimby_locked = False
        return rqd_pb2.RqdStaticNimbyOffResponse()

    async def ShutdownRqdNow(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("ShutdownRqdNow")
        self._host.state = host_pb2.DOWN
        self._host.kill_all()
        self._served.stop_soon()
        return rqd_pb2.RqdStaticShutdownNowResponse()

    async def ShutdownRqdIdle(self, request: Any, context: Any) -> Any:  # noqa: N802, ARG002
        await self._passed("ShutdownRqdIdle")
        self._host.locked_centicores = centicores(self._host.spec.cores)
        self._served.stop_soon()
        return rqd_pb2.RqdStaticShutdownIdleResponse()

    async def _passed(self, name: str) -> None:
        await self._served.gate.wait()
        self._served.calls[name] += 1


class ServedHost:
    """A host, its gRPC server and its reports. Used inside the event loop only."""

    def __init__(self, host: SimulatedHost, address: str, farm: Surroundings) -> None:
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
            self._spawn(self._report_for_ever())

    async def stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        server, self._server = self._server, None
        if server is not None:
            await server.stop(0)

    async def crash(self) -> None:
        self.host.crash()
        await self.stop()

    def stop_soon(self) -> None:
        """Stop once no frame runs any more, as ShutdownRqdNow and ShutdownRqdIdle do."""

        async def stop() -> None:
            while self.host.frame_ids:
                await asyncio.sleep(0.05)
            await asyncio.sleep(0.05)
            await self.stop()

        self._farm.spawn(stop())

    async def report_status(self) -> bool:
        request = report_pb2.RqdReportStatusRequest(host_report=self.host.host_report())
        return await self._send("ReportStatus", request)

    async def _report_for_ever(self) -> None:
        boot = report_pb2.RqdReportRqdStartupRequest(boot_report=self.host.boot_report())
        await self._send("ReportRqdStartup", boot)
        shortest, longest = self._farm.report_seconds
        while longest > 0:
            await asyncio.sleep(self._farm.rng.uniform(shortest, longest))
            await self.gate.wait()
            await self.report_status()

    async def _completed(self, run: FrameRun, frame: Any) -> None:
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

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
