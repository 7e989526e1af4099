"""Phases of mbarriers: what counts in which, and what may count in another in another order."""

from __future__ import annotations

from . import events as ev
from .events import Event
from .names import Names
from .state import Finding, Mbarrier, Process


class Phases:
    """What `search.Run` does at mbarriers."""

    names: Names
    processes: list[Process]
    past: list[int]
    what: list[tuple[int, Event]]
    findings: list[Finding]
    mbarriers: dict[int, Mbarrier]

    def step(self, process: Process, event: Event, extra: int = 0) -> int:
        """Record a step of a process; `extra` is what else lies in its past."""
        number = len(self.past)
        process.past |= extra | (1 << number)
        self.past.append(process.past)
        self.what.append((process.number, event))
        return number

    def fault(self, kind: str, text: str, step: int, *others: int) -> Finding:
        """Add a finding; `others` are the steps that it is about besides."""
        finding = Finding(kind, text, step, others)
        self.findings.append(finding)
        return finding

    def who(self, process: Process) -> str:
        """A process in the words of the tables."""
        return self.names.who(process.cta, process.warp)

    def _barrier(
        self, process: Process, event: Event, step: int, before: int | None = None
    ) -> Mbarrier | None:
        """The mbarrier of an event; a fault where it may not be initialised yet.

        `before`: the past of the process without what the event itself brings.
        """
        barrier = self.mbarriers.get(event.at)
        if barrier is None:
            self.fault(
                "not initialised",
                f"{self.who(process)} uses {self.names.barrier(event.at)}, which nobody has "
                "initialised",
                step,
            )
            return None
        if not (process.past if before is None else before) >> barrier.init & 1:
            self.fault(
                "not initialised",
                f"{self.who(process)} may use {self.names.barrier(event.at)} before it is "
                "initialised: nothing orders the two",
                step,
                barrier.init,
            )
        return barrier

    def _init(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        if event.at in self.mbarriers:
            self.fault(
                "initialised twice",
                f"{self.who(process)} initialises {self.names.barrier(event.at)} again",
                step,
            )
        self.mbarriers[event.at] = Mbarrier(event.count, step, event.count)
        return True

    def _arrive(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        barrier = self._barrier(process, event, step)
        if barrier is not None:
            self.count(process, event, barrier, step, event.count, 0)
        return True

    def _expect(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        barrier = self._barrier(process, event, step)
        if barrier is not None:
            self.count(process, event, barrier, step, event.count, event.value)
        return True

    def count(
        self,
        process: Process,
        event: Event,
        barrier: Mbarrier,
        step: int,
        arrivals: int,
        announced: int,
    ) -> None:
        """Let arrivals and announced (or, negative, moved) bytes count in the current phase."""
        name, phase = self.names.barrier(event.at), barrier.phase
        if phase and barrier.ended[phase - 1] & ~self.past[step]:
            barrier.doubts.setdefault(
                phase - 1,
                Finding(
                    "phase may end early",
                    f"{name}: {self._what(process, event, announced)} by {self.who(process)} "
                    f"counts in phase {phase}, but nothing makes it wait for the end of phase "
                    f"{phase - 1}, where it may count as well",
                    step,
                ),
            )
            self._overtaken(event.at, barrier, step)
        barrier.largest = max(barrier.largest, arrivals)
        if barrier.largest > 1:  # in another order these may pass the end of a phase
            self.findings += barrier.doubts.values()
            barrier.doubts.clear()
        if 0 < arrivals > barrier.pending:
            self.fault(
                "too many arrivals",
                f"{name}, phase {phase}: {self.who(process)} brings {arrivals} arrivals where "
                f"{barrier.pending} of {barrier.expected} are still to come",
                step,
            )
        barrier.pending -= arrivals
        barrier.tx += announced
        barrier.clock |= self.past[step]
        barrier.counted.append((step, arrivals, announced))
        if barrier.pending <= 0 and barrier.tx == 0:
            self.end_phase(event.at, barrier, step)

    def _overtaken(self, address: int, barrier: Mbarrier, step: int) -> None:
        """Waits that saw one phase and might, had this step come before them, see another."""
        for phase in range(barrier.phase - 1, -1, -1):
            if not barrier.ended[phase] & ~self.past[step]:
                return
            if barrier.waits.get(phase):  # it has been seen to end, and may end with other arrivals
                self.findings += barrier.doubts.values()
                barrier.doubts.clear()
            for wait in barrier.waits.get(phase - 1, []):
                if not self.past[step] >> wait & 1:
                    self._wrong_phase(address, phase, wait, step)
                    return

    def _what(self, process: Process, event: Event, announced: int) -> str:
        if event.kind == ev.COPY:
            return f"a copy of {-announced} B"
        return "an arrival" if event.kind == ev.ARRIVE else f"an announcement of {announced} B"

    def end_phase(self, address: int, barrier: Mbarrier, step: int) -> None:
        """The current phase is complete."""
        self._announced_in_time(address, barrier)
        for wait in barrier.waits.get(barrier.phase - 1, []):
            if not barrier.clock >> wait & 1:
                self._wrong_phase(address, barrier.phase, wait, step)
                break
        barrier.ended.append(barrier.clock)
        barrier.phase += 1
        barrier.pending, barrier.clock, barrier.counted = barrier.expected, 0, []

    def _wrong_phase(self, address: int, phase: int, wait: int, step: int) -> None:
        """A phase may end, at `step`, before a wait for the phase before it."""
        waiting = self.processes[self.what[wait][0]]
        passed = (
            f"has seen that phase {phase - 1} has"
            if phase
            else "looks, which takes the beginning for the end of a phase"
        )
        self.fault(
            "wrong phase",
            f"{self.names.barrier(address)}: phase {phase} may end before {self.who(waiting)} "
            f"{passed}; its wait is for the wrong parity then",
            step,
            wait,
        )

    def _announced_in_time(self, address: int, barrier: Mbarrier) -> None:
        """Bytes announced without an arrival must be so before some arrival, or come too late."""
        for announced, arrivals, moved in barrier.counted:
            if arrivals or moved <= 0:
                continue
            arrived = (step for step, count, _ in barrier.counted if count)
            if not any(self.past[step] >> announced & 1 for step in arrived):
                doubt = Finding(
                    "phase may end early",
                    f"{self.names.barrier(address)}: phase {barrier.phase} may end before "
                    f"{self.who(self.processes[self.what[announced][0]])} announces {moved} B",
                    announced,
                )
                barrier.doubts.setdefault(barrier.phase, doubt)

    def _wait(self, process: Process, event: Event) -> bool:
        barrier = self.mbarriers.get(event.at)
        if barrier is not None and (barrier.phase & 1) == event.value:
            return False
        seen = -1 if barrier is None else barrier.phase - 1
        extra = barrier.ended[seen] if barrier is not None and seen >= 0 else 0
        before = process.past
        step = self.step(process, event, extra)
        barrier = self._barrier(process, event, step, before)
        if barrier is None:
            return True
        for phase, doubt in list(barrier.doubts.items()):
            if phase <= seen:
                self.findings.append(barrier.doubts.pop(phase))
                doubt.others = (*doubt.others, step)
        if seen >= 1 and barrier.ended[seen - 1] & ~before:
            self.fault(
                "wrong phase",
                f"{self.who(process)} waits on {self.names.barrier(event.at)} for parity "
                f"{event.value} and sees phase {seen} end, but nothing makes it wait for the end "
                f"of phase {seen - 1}: it may as well see phase {seen - 2}",
                step,
            )
        barrier.waits.setdefault(seen, []).append(step)
        return True
