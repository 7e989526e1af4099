"""Why a kernel hangs: which warps wait for which, and the cycle that this closes.

Built on what a watched kernel reported (`waits.decode`) and on its tables, which say whose arrivals
and whose bytes end a wait.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .barriers import Barriers
from .roles import WARP
from .waits import Mbarrier, Stuck, Tables, Wait

WAITING = ("empty", "full", "barrier")


@dataclass(frozen=True)
class Group:
    """Warps of one CTA and role that are at the same place."""

    cta: Stuck
    warps: tuple[int, ...]
    at: Wait

    def __str__(self) -> str:
        runs: list[list[int]] = []
        for warp in self.warps:
            if runs and runs[-1][-1] == warp - 1:
                runs[-1].append(warp)
            else:
                runs.append([warp])
        parts = [f"{r[0]}-{r[-1]}" if len(r) > 1 else f"{r[0]}" for r in runs]
        return f"{self.at.role} warp{'s' if len(self.warps) > 1 else ''} {', '.join(parts)}"

    def does(self, verb: str, plural: str | None = None) -> str:
        """The group with its verb."""
        return f"{self} {verb if len(self.warps) == 1 else plural or verb.removesuffix('s')}"


def groups(ctas: Sequence[Stuck]) -> list[Group]:
    """The warps of these CTAs by where they are."""
    found: dict[tuple, list[Wait]] = {}
    for i, cta in enumerate(ctas):
        for wait in cta.waits:
            found.setdefault((i, wait.place), []).append(wait)
    return [
        Group(ctas[i], tuple(wait.warp for wait in waits), waits[0])
        for (i, _), waits in found.items()
    ]


def awaited(kernel: Tables, group: Group, among: Sequence[Group]) -> list[Group]:
    """The groups whose arrivals or copies would end the wait of this one."""
    at = group.at
    if at.kind == "barrier":  # who should come is in no table: its own role, if it has others
        others = [g for g in among if g.cta is group.cta and g.at.place[1:] != at.place[1:]]
        return [g for g in others if g.at.role == at.role] or others
    if at.kind not in WAITING:
        return []
    ring = kernel.rings[at.name]
    role = ring.consumer if at.kind == "empty" else ring.producer
    return [
        g
        for g in among
        if g.at.role == role
        and (g.cta is group.cta or (ring.multicast and one_cluster(kernel, g.cta, group.cta)))
    ]


def one_cluster(kernel: Tables, one: Stuck, other: Stuck) -> bool:
    """Whether two CTAs are of one cluster."""
    m, n = kernel.cluster
    a, b = one.block, other.block
    return (a[0] // m, a[1] // n, a[2]) == (b[0] // m, b[1] // n, b[2])


def cycle(kernel: Tables, among: Sequence[Group]) -> list[Group]:
    """The fewest groups of which each waits for the next, the last for the first; or none."""
    waiting = [g for g in among if g.at.kind in WAITING]
    places = {id(g): i for i, g in enumerate(waiting)}
    after = [
        [places[id(g)] for g in awaited(kernel, one, among) if id(g) in places] for one in waiting
    ]

    def back(start: int) -> list[int]:
        paths, seen = [[start]], {start}
        for path in paths:  # which grow while they are walked
            for following in after[path[-1]]:
                if following == start:
                    return path
                if following not in seen:
                    seen.add(following)
                    paths.append([*path, following])
        return []

    found = [path for path in map(back, range(len(waiting))) if path]
    return [waiting[i] for i in min(found, key=len, default=[])]


def explain(kernel: Tables, ctas: Sequence[Stuck]) -> str:
    """What hangs: every wait of the first CTA's cluster, the cycle, and how many CTAs are alike."""
    first = ctas[0]
    cluster = [cta for cta in ctas if one_cluster(kernel, cta, first)]
    among = groups(cluster)
    lines = []
    for cta in cluster:
        mine = [g for g in among if g.cta is cta]
        lines.append(f"{cta}:")
        lines += [f"  {said(kernel, g, among)}" for g in mine if g.at.kind != "ended"]
        lines += [f"  {g.does('has ended', 'have ended')}" for g in mine if g.at.kind == "ended"]
    closed = cycle(kernel, among)
    if closed:
        several = len({id(g.cta) for g in closed}) > 1
        names = [f"{g} of {g.cta}" if several else str(g) for g in (*closed, closed[0])]
        lines.append(f"the cycle: {' -> '.join(names)}")
    else:
        lines.append("no cycle: what is waited for would come from warps that do not wait")
    others = len(ctas) - len(cluster)
    if others:
        alike = sum(_picture(cta) == _picture(first) for cta in ctas) - sum(
            _picture(cta) == _picture(first) for cta in cluster
        )
        lines.append(f"{others} more CTAs reported, {alike} of them the waits of {first}")
    return "\n".join(lines)


def _picture(cta: Stuck) -> tuple:
    return tuple(wait.place for wait in cta.waits)


def said(kernel: Tables, group: Group, among: Sequence[Group]) -> str:
    """A group's wait, what is missing to it and who should bring that."""
    at = group.at
    if at.kind == "runs":
        return f"{group.does('runs')}, at no wait since {at.seconds:.1f} s"
    if at.kind == "barrier":
        text = f"{group.does('waits')} at {_barrier(kernel, group, among)}"
    else:
        ring = kernel.rings[at.name]
        state = group.cta.mbarriers[at.name, at.kind, at.stage]
        text = f"{group.does('waits')} for ring {at.name} slot {at.stage} to become {at.kind} "
        expected = ring.transaction_bytes(kernel.tiles) if at.kind == "full" else 0
        text += f"(phase {at.phase}): {_missing(expected, state)}"
    sources = awaited(kernel, group, among)
    alive = [g for g in sources if g.at.kind != "ended"]
    if alive:
        return f"{text}, from {_listed(alive, group)}"
    if at.kind == "barrier":
        return f"{text}, and all others have ended"
    return (
        f"{text}, and every {ring.producer if at.kind == 'full' else ring.consumer} warp has ended"
    )


def _missing(expected: int, state: Mbarrier) -> str:
    """What an mbarrier lacks to end its phase."""
    text = f"expects {expected:,} bytes, " if expected else ""
    if not state.arrivals:
        return f"{text}its mbarrier was read as zeros, so what is missing is not known"
    if state.missing:
        return f"{text}{state.missing} of {state.arrivals} arrivals are missing"
    if state.missing_bytes:
        return f"{text}{state.missing_bytes:,} bytes are missing"
    return f"{text}nothing is missing, so this phase has ended or is the next one"


def _barrier(kernel: Tables, group: Group, among: Sequence[Group]) -> str:
    """A named barrier and how many threads wait there."""
    name, number = group.at.name, group.at.stage
    barriers: Barriers = kernel.barriers
    barrier = barriers.table[name]
    copy = f" copy {number - barriers.number(name)}" if barrier.copies > 1 else ""
    here = [g for g in among if g.cta is group.cta and g.at.place[1:] == group.at.place[1:]]
    threads = WARP * sum(len(g.warps) for g in here)
    return (
        f"named barrier {name}{copy} (hardware barrier {number}): of {barrier.threads} threads "
        f"that it needs, {threads} wait there"
    )


def _listed(found: Sequence[Group], near: Group) -> str:
    names = [str(g) if g.cta is near.cta else f"{g} of {g.cta}" for g in found]
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)
