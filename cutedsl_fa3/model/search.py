"""All interleavings of the warps and the copy engine, by the one order that stands for all.

The warps are run, each as far as it can, and every step notes its causal past: the steps that come
before it in every interleaving. Two interleavings differ in more than the order of independent
steps only if somewhere

    an arrival, or bytes of a copy, may count for the phase before the one it counts for here
    a wait may see another phase than it sees here, because that one may end first or twice
    two rounds of a named barrier may mix

and each of these is a fault that the causal pasts show. Where none is found every interleaving is
a reordering of this one: it ends if this one ends, it stops where this one stops, and two accesses
to the same bytes may meet if and only if neither lies in the other's past. So the reduction keeps
one interleaving, and keeps all faults. `explore.py` walks all of them, to check this on what is
small enough.

The copy engine is a party of its own: a copy's bytes land at any time after its issue. The lanes of
a warp go in step, and so does what a warp does from one branch to the next.
"""

from __future__ import annotations

from collections.abc import Sequence

from . import events as ev
from .events import CTA_BYTES, Event, Region
from .names import Names
from .phases import Phases
from .state import Access, Finding, Mbarrier, Process, Round

WARP = 32
CLUSTER = -1  # the number of the barrier of all CTAs


class Run(Phases):
    """One execution of a cluster's warps, with the causal past of every step."""

    def __init__(self, processes: Sequence[Process], names: Names, threads: int) -> None:
        self.processes, self.names, self.threads = list(processes), names, threads
        for number, process in enumerate(self.processes):
            process.number = number
        self.past: list[int] = []
        self.what: list[tuple[int, Event]] = []
        self.mbarriers: dict[int, Mbarrier] = {}
        self.rounds: dict[int, Round] = {}
        self.accesses: list[Access] = []
        self.proxy_fences: list[int] = []
        self.memory: dict[int, int] = {}
        self.findings: list[Finding] = []
        self.orders: dict[int, int] = {}

    def run(self) -> None:
        """Run every warp as far as it gets."""
        moved = True
        while moved:
            moved = False
            for process in self.processes:
                while not process.done and self.advance(process):
                    moved = True

    def advance(self, process: Process) -> bool:
        """One step of a warp, if it is not held."""
        if process.event is None:
            try:
                reply, process.reply = process.reply, None
                send = getattr(process.steps, "send", None)
                process.event = send(reply) if send else next(process.steps)
            except StopIteration:
                process.event = Event(ev.END)
            process.taken.append(process.event)
        event = process.event
        if not getattr(self, "_" + event.kind.replace(" ", "_"))(process, event):
            return False
        process.event = None
        return True

    # Copies.

    def _copy(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        for address, region in event.targets:
            landed = self.step_of_engine(process, event, step)
            self._access("copy", process, region, step, landed)
            barrier = self._barrier(process, Event(ev.COPY, address), step)
            if barrier is not None:
                moved = Event(ev.COPY, address, value=event.value)
                self.count(process, moved, barrier, landed, 0, -event.value)
        return True

    def step_of_engine(self, process: Process, event: Event, issue: int) -> int:
        """The landing of a copy: after its issue, in nobody's past but by the mbarrier."""
        number = len(self.past)
        self.past.append(self.past[issue] | (1 << number))
        self.what.append((process.number, event._replace(kind="landed")))
        return number

    def _access(
        self,
        kind: str,
        process: Process,
        region: Region,
        begin: int,
        end: int | None,
        exact: bool = True,
    ) -> int:
        writes = process.number if kind in ("copy", "write") else -1 - process.number
        order = self.orders[writes] = self.orders.get(writes, 0) + 1
        self.accesses.append(Access(kind, process.number, region, begin, end, exact, order))
        return len(self.accesses) - 1

    def _read(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        self._access("read", process, event.region, step, step, event.exact)
        if len(event.region) == 1:
            process.reply = self.memory.get(event.region[0][0])
        return True

    def _write(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        self._access("write", process, event.region, step, step, event.exact)
        if event.count and len(event.region) == 1:
            self.memory[event.region[0][0]] = event.value
        return True

    def _store(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        process.stores.append(self._access("store", process, event.region, step, None))
        return True

    def _store_commit(self, process: Process, event: Event) -> bool:
        self.step(process, event)
        process.store_groups.append(process.stores)
        process.stores = []
        return True

    def _store_wait(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        while len(process.store_groups) > event.value:
            for access in process.store_groups.pop(0):
                self.accesses[access].end = step
        return True

    def _proxy_fence(self, process: Process, event: Event) -> bool:
        self.proxy_fences.append(self.step(process, event))
        return True

    # WGMMA.

    def _fence(self, process: Process, event: Event) -> bool:
        self.step(process, event)
        process.dirty.clear()
        process.written.clear()
        process.fenced = True
        return True

    def _product(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        accumulator, operand = event.at, event.value
        if not process.fenced or accumulator in process.dirty or operand in process.written:
            which = "its accumulator" if accumulator in process.dirty else "operand A's registers"
            why = f"{which} were accessed since the last one" if process.fenced else "there is none"
            self.fault(
                "fence missing",
                f"{self.who(process)} multiplies {self.names.region(event.region)} without a "
                f"warpgroup fence: {why}",
                step,
            )
            process.fenced = True
            process.dirty.clear()
            process.written.clear()
        process.open_registers[0].add(accumulator)
        process.open_registers[1].add(operand)
        if process.open:
            access = self.accesses[process.open[-1]]
            access.times += 1
            access.region = ev.merged([*access.region, *event.region])
        elif event.region:
            process.open.append(self._access("product", process, event.region, step, None))
        return True

    def _commit(self, process: Process, event: Event) -> bool:
        self.step(process, event)
        process.groups.append((process.open, *process.open_registers))
        process.open, process.open_registers = [], (set(), set())
        return True

    def _retire(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        while len(process.groups) > event.value:
            for access in process.groups.pop(0)[0]:
                self.accesses[access].end = step
        return True

    def _touch(self, process: Process, event: Event) -> bool:
        in_flight = [group[1:] for group in process.groups] + [process.open_registers]
        process.dirty.add(event.at)
        if event.value:
            process.written.add(event.at)
        for accumulators, operands in in_flight:
            if event.at in accumulators or (event.value and event.at in operands):
                step = self.step(process, event)
                what = "the accumulator" if event.at in accumulators else "operand A"
                self.fault(
                    "registers in use",
                    f"{self.who(process)} {'writes' if event.value else 'reads'} {what} of a WGMMA "
                    "that still runs: a wait_group is missing before it",
                    step,
                )
                accumulators.discard(event.at)
                operands.discard(event.at)
        return True

    # Named barriers.

    def _join(self, process: Process, event: Event, number: int, threads: int) -> Round:
        step = self.step(process, event)
        name = self.names.named_barrier(number)
        meeting = self.rounds.setdefault(number, Round(event.count))
        if meeting.arrived == 0:
            meeting.expected = event.count
        elif meeting.expected != event.count:
            self.fault(
                "barrier used by two",
                f"{name}: {self.who(process)} comes for {event.count} threads, others of the same "
                f"round for {meeting.expected}",
                step,
            )
        again = [m for m in meeting.members if self.what[m][0] == process.number]
        if again:
            self.fault(
                "out of turn",
                f"{name}: {self.who(process)} comes twice in round {meeting.number}, before "
                f"{meeting.expected} threads have met",
                step,
                *again,
            )
        if meeting.number and meeting.ended[-1] & ~self.past[step]:
            self.fault(
                "out of turn",
                f"{name}: {self.who(process)} comes in round {meeting.number}, but nothing makes "
                f"it wait for the end of round {meeting.number - 1}: the rounds may mix",
                step,
            )
        meeting.arrived += threads
        meeting.clock |= self.past[step]
        meeting.members.append(step)
        process.joined = meeting.number
        if meeting.arrived >= meeting.expected:
            meeting.ended.append(meeting.clock)
            meeting.number += 1
            meeting.arrived, meeting.clock, meeting.members = 0, 0, []
        return meeting

    def _sync(self, process: Process, event: Event) -> bool:
        if process.joined is None:
            meeting = self._join(process, event, event.at, WARP)
        meeting = self.rounds[event.at]
        if meeting.number <= process.joined:
            return False
        self.step(process, Event("released", event.at), meeting.ended[process.joined])
        process.joined = None
        return True

    def _signal(self, process: Process, event: Event) -> bool:
        self._join(process, event, event.at, WARP)
        process.joined = None
        return True

    def _cluster_arrive(self, process: Process, event: Event) -> bool:
        whole = self.threads * self.names.ctas
        self._join(process, event._replace(count=whole), CLUSTER, WARP)
        return True

    def _cluster_wait(self, process: Process, event: Event) -> bool:
        meeting = self.rounds.get(CLUSTER)
        if meeting is None or process.joined is None or meeting.number <= process.joined:
            return False
        self.step(process, event, meeting.ended[process.joined])
        process.joined = None
        return True

    def _end(self, process: Process, event: Event) -> bool:
        step = self.step(process, event)
        process.done = True
        if process.open or (process.groups and any(g[0] for g in process.groups)):
            self.fault(
                "ends too soon", f"{self.who(process)} ends while a WGMMA of it still runs", step
            )
        if process.stores or process.store_groups:
            self.fault(
                "ends too soon",
                f"{self.who(process)} ends while a TMA store may still read shared memory",
                step,
            )
        return True


def cta_of(address: int) -> int:
    """The CTA in whose shared memory an address lies."""
    return address // CTA_BYTES - 1
