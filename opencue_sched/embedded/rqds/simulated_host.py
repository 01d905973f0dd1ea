"""One simulated render host: its cores, its frames and its faults, without a network.

Everything here runs in the event loop of `simulated_rqd.SimulatedFarm`. Amounts as on the wire: centicores and KB.
"""

from __future__ import annotations

import asyncio
import random
import re
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from opencue_proto import host_pb2, report_pb2, rqd_pb2

from opencue_sched.domain.units import CENTICORES_PER_CORE

KILL_STATUS, KILL_SIGNAL = 1, 9
"""The exit status and signal with which a killed frame ends: RQD kills by SIGKILL."""
_SWAP_KB, _TEMP_KB, _TEMP_FREE_KB = 2 * 1024 * 1024, 200 * 1024 * 1024, 180 * 1024 * 1024
"""The swap of every host, and the size of its temporary directory (mcp) with what is free there: enough for no host to
go into REPAIR."""
_COMMAND = re.compile(r"\bsimulate\b(.*)$", re.DOTALL)
"""What a frame's command says of its own run: see Behaviour."""


@dataclass(frozen=True, slots=True)
class HostSpec:
    """What a host has."""

    name: str
    cores: int = 16
    """Whole cores."""
    memory_kb: int = 64 * 1024 * 1024
    gpus: int = 0
    gpu_memory_kb: int = 0
    tags: tuple[str, ...] = ()
    facility: str = "local"
    os_name: str = "Linux"
    """The host's SP_OS attribute."""


class Answer(StrEnum):
    """What becomes of the answer to a LaunchFrame that was carried out."""

    GIVEN = "given"
    CUT_OFF = "cut_off"
    """The connection breaks in place of the answer: the caller gets UNAVAILABLE."""
    NEVER = "never"
    """No answer comes, and the connection stays: the caller runs into its time-out."""


@dataclass(frozen=True, slots=True)
class Behaviour:
    """How a host behaves. Ratios are parts of all its frames, from 0 to 1.

    SimulatedHost.behaviour may be replaced at any moment. A frame whose command has ``simulate seconds=2 exit=1
    signal=0`` or ``simulate hang`` in it runs as its command says instead.
    """

    run_seconds: tuple[float, float] = (0.05, 0.2)
    """Shortest and longest run of a frame; uniform in between."""
    failure_ratio: float = 0.0
    """Ratio of frames that end with ``failure_status``."""
    failure_status: int = 1
    hang_ratio: float = 0.0
    """Ratio of frames that never end by themselves."""
    accept_seconds: float = 0.0
    """Time a LaunchFrame call takes before anything starts."""
    setup_seconds: float = 0.0
    """Time an accepted frame holds its cores before it is listed and can be killed."""
    kill_seconds: float = 0.0
    """Time from an accepted kill to the end of the frame."""
    refusal: str = ""
    """The text with which launches are refused; empty: none is."""
    refusals_left: int | None = None
    """How many more launches are refused with that text; None: all."""
    launch_answer: Answer = Answer.GIVEN
    completions_lost: bool = False
    """Whether completions are not reported; as with RQD, they are never sent later."""
    memory_used_kb: int = 262_144
    """Memory that each frame uses."""
    nameless: bool = False
    """Whether reports have no host's name: the one simulated host stands for several hosts of the farm."""


@dataclass(slots=True)
class FrameRun:
    """One run of one frame. Its host keeps it after the frame's end. Times are those of time.monotonic()."""

    host_name: str
    frame_id: str
    proc_id: str
    frame_name: str
    job_name: str
    num_cores: int
    """Centicores, as in RunFrame."""
    started: float
    ended: float | None = None
    """The time of the run's end; None while the frame runs."""
    exit_status: int | None = None
    """The exit status of the run; None while the frame runs, and after a crash of the host."""
    exit_signal: int = 0
    killed: bool = False
    """Whether the run ended by SimulatedHost.kill()."""
    crashed: bool = False
    """Whether the host crashed while the frame ran."""
    completion_delivered: bool | None = None
    """Whether the report of the run's completion was delivered; None until that was tried. Set by the simulated farm,
    all other fields by the host."""


@dataclass(slots=True)
class _Active:
    """A frame that holds cores now."""

    run: FrameRun
    frame: rqd_pb2.RunFrame
    """The frame as it was launched."""
    is_set_up: bool = False
    """Whether the frame's set-up is over: from then on reports list it, and it can be killed."""
    task: asyncio.Task[None] | None = None
    """The task that carries the frame from its launch to its end."""
    end: asyncio.Future[tuple[int, int]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """The exit status and signal with which the frame ends; done when it is to end."""


class SimulatedRefusal(Exception):
    """A launch is refused. The text is what RQD would say."""


class SimulatedHost:
    """A host that runs frames: they come by launch(), and go by their own end, finish(), kill() or crash()."""

    def __init__(self, spec: HostSpec, behaviour: Behaviour, *, rng: random.Random) -> None:
        self.spec = spec
        self.behaviour = behaviour
        self.state: int = host_pb2.UP
        """The host's HardwareState, which the simulated farm sets. A launch is refused unless the host is UP."""
        self.boot_time = int(time.time())
        """Epoch seconds."""
        self.runs: list[FrameRun] = []
        """Every run that ever began here, in order."""
        self.violations: list[str] = []
        """What the scheduler did that it never may: one sentence each."""
        self.on_end: Callable[[FrameRun, rqd_pb2.RunFrame], Awaitable[None]] | None = None
        """Awaited when a frame has ended other than by crash(); set by the simulated farm, which reports the
        completion."""
        self._rng = rng
        self._active: dict[str, _Active] = {}
        """The frames that hold cores, by frame id."""

    @property
    def booked_centicores(self) -> int:
        """The centicores that frames on the host hold, listed or not."""
        return sum(active.run.num_cores for active in self._active.values())

    @property
    def idle_centicores(self) -> int:
        """The centicores that no frame holds."""
        return self.spec.cores * CENTICORES_PER_CORE - self.booked_centicores

    @property
    def frame_ids(self) -> frozenset[str]:
        """Frames that hold cores, listed or not."""
        return frozenset(self._active)

    def launch(self, frame: rqd_pb2.RunFrame) -> FrameRun:
        """Start a frame, or raise SimulatedRefusal. The checks are those of RQD, in RQD's order."""
        self._refuse_on_purpose()
        if self.state != host_pb2.UP:
            raise SimulatedRefusal("Not launching, rqd HardwareState is not Up")
        active = self._active.get(frame.frame_id)
        if active is not None:
            if not active.is_set_up:
                self.violations.append(f"frame {frame.frame_id} was sent again to {self.spec.name} during its set-up")
            raise SimulatedRefusal(f"Not launching, frame is already running on this proc {frame.frame_id}")
        if frame.HasField("uid") and frame.uid <= 0:
            raise SimulatedRefusal(f"Not launching, will not run frame as uid={frame.uid}")
        if frame.num_cores <= 0:
            raise SimulatedRefusal("Not launching, numCores must be > 0")
        if self.idle_centicores < frame.num_cores:
            raise SimulatedRefusal("Not launching, insufficient idle cores")
        return self._start(frame)

    def kill(self, frame_id: str) -> bool:
        """Have a frame end ``kill_seconds`` from now. False when no such frame is listed."""
        active = self._active.get(frame_id)
        if active is None or not active.is_set_up:
            return False
        self._end_with(active, KILL_STATUS, KILL_SIGNAL, after=self.behaviour.kill_seconds, killed=True)
        return True

    def finish(self, frame_id: str, exit_status: int = 0, exit_signal: int = 0) -> bool:
        """End a frame as if its command had ended. False when there is no such frame."""
        active = self._active.get(frame_id)
        if active is None:
            return False
        self._end_with(active, exit_status, exit_signal)
        return True

    def crash(self) -> None:
        """Cut the machine's power: every frame is gone, and no completion is reported."""
        now = time.monotonic()
        for active in self._active.values():
            active.run.ended, active.run.crashed = now, True
            if active.task is not None:
                active.task.cancel()
        self._active.clear()

    def render_host(self) -> report_pb2.RenderHost:
        """What reports say of the machine."""
        spec = self.spec
        used = sum(self.behaviour.memory_used_kb for _ in self._active)
        return report_pb2.RenderHost(
            name="" if self.behaviour.nameless else spec.name,
            nimby_enabled=False,
            facility=spec.facility,
            num_procs=1,
            cores_per_proc=spec.cores * CENTICORES_PER_CORE,
            total_swap=_SWAP_KB,
            free_swap=_SWAP_KB,
            total_mem=spec.memory_kb,
            free_mem=max(0, spec.memory_kb - used),
            total_mcp=_TEMP_KB,
            free_mcp=_TEMP_FREE_KB,
            load=self.booked_centicores,
            boot_time=self.boot_time,
            tags=list(spec.tags),
            state=self.state,
            attributes={"SP_OS": spec.os_name},
            num_gpus=spec.gpus,
            total_gpu_mem=spec.gpu_memory_kb,
            free_gpu_mem=spec.gpu_memory_kb,
        )

    def core_detail(self) -> report_pb2.CoreDetail:
        """What reports say of the host's cores, in centicores."""
        return report_pb2.CoreDetail(
            total_cores=self.spec.cores * CENTICORES_PER_CORE,
            idle_cores=max(0, self.idle_centicores),
            booked_cores=self.booked_centicores,
        )

    def host_report(self) -> report_pb2.HostReport:
        """The regular report: the host, its cores and the frames that are listed."""
        frames = [self.running_info(active.frame) for active in self._active.values() if active.is_set_up]
        return report_pb2.HostReport(host=self.render_host(), frames=frames, core_info=self.core_detail())

    def boot_report(self) -> report_pb2.BootReport:
        """The report of a host that has just started."""
        return report_pb2.BootReport(host=self.render_host(), core_info=self.core_detail())

    def running_info(self, frame: rqd_pb2.RunFrame) -> report_pb2.RunningFrameInfo:
        """What reports say of a frame."""
        used = self.behaviour.memory_used_kb
        return report_pb2.RunningFrameInfo(
            resource_id=frame.resource_id,
            job_id=frame.job_id,
            job_name=frame.job_name,
            frame_id=frame.frame_id,
            frame_name=frame.frame_name,
            layer_id=frame.layer_id,
            num_cores=frame.num_cores,
            start_time=frame.start_time,
            max_rss=used,
            rss=used,
            max_vsize=used,
            vsize=used,
            llu_time=int(time.time()),
            num_gpus=frame.num_gpus,
        )

    def listed(self, frame_id: str) -> rqd_pb2.RunFrame | None:
        """The listed frame of this id; None where there is none."""
        active = self._active.get(frame_id)
        return active.frame if active is not None and active.is_set_up else None

    def _refuse_on_purpose(self) -> None:
        """Raise SimulatedRefusal if the behaviour asks for that, and take one off the behaviour's refusals_left."""
        behaviour = self.behaviour
        if not behaviour.refusal or behaviour.refusals_left == 0:
            return
        if behaviour.refusals_left is not None:
            self.behaviour = replace(behaviour, refusals_left=behaviour.refusals_left - 1)
        raise SimulatedRefusal(behaviour.refusal)

    def _start(self, frame: rqd_pb2.RunFrame) -> FrameRun:
        """Begin a frame that RQD was told to run. Called in the event loop."""
        run = FrameRun(
            host_name=self.spec.name,
            frame_id=frame.frame_id,
            proc_id=frame.resource_id,
            frame_name=frame.frame_name,
            job_name=frame.job_name,
            num_cores=frame.num_cores,
            started=time.monotonic(),
        )
        active = _Active(run, frame)
        self.runs.append(run)
        self._active[frame.frame_id] = active
        active.task = asyncio.get_running_loop().create_task(self._run(active))
        return run

    async def _run(self, active: _Active) -> None:
        """Carry a frame from its launch to its end."""
        if self.behaviour.setup_seconds:
            await asyncio.sleep(self.behaviour.setup_seconds)
        active.is_set_up = True
        seconds, status, signal_number = self._fate_of(active.frame)
        if seconds is not None:
            self._end_with(active, status, signal_number, after=seconds)
        status, signal_number = await active.end
        active.run.exit_status, active.run.exit_signal = status, signal_number
        active.run.ended = time.monotonic()
        del self._active[active.run.frame_id]
        if self.on_end is not None:
            await self.on_end(active.run, active.frame)

    def _fate_of(self, frame: rqd_pb2.RunFrame) -> tuple[float | None, int, int]:
        """How a frame's run goes: its seconds (None: it never ends by itself), exit status and exit signal."""
        behaviour = self.behaviour
        seconds: float | None = self._rng.uniform(*behaviour.run_seconds)
        status = signal_number = 0
        if self._rng.random() < behaviour.failure_ratio:
            status = behaviour.failure_status
        if self._rng.random() < behaviour.hang_ratio:
            seconds = None
        command = _COMMAND.search(frame.command)
        for word in command.group(1).split() if command else ():
            key, _, value = word.partition("=")
            if key == "hang":
                seconds = None
            elif key == "seconds":
                seconds = float(value)
            elif key == "exit":
                status = int(value)
            elif key == "signal":
                signal_number = int(value)
        return seconds, status, signal_number

    @staticmethod
    def _end_with(
        active: _Active, status: int, signal_number: int, *, after: float = 0.0, killed: bool = False
    ) -> None:
        """Have a frame end with this status and signal in ``after`` seconds, unless it has an end by then."""

        def end() -> None:
            # A frame may be killed after its own end has been set, or the reverse: the first one counts.
            if not active.end.done():
                active.run.killed = killed
                active.end.set_result((status, signal_number))

        asyncio.get_running_loop().call_later(after, end)
