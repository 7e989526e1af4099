"""What the machine code of every shipped kernel is known to be, loop by loop.

An audit asks whether code keeps what its tables promise; a contract asks whether it is still the
code that was looked at. It holds, for each kernel, what ptxas reports (registers, stack, spills,
shared memory, advisories) and for each loop how often each instruction of interest stands in it.
Contracts are of one compiler: `STORED` names it, and code from another one is not compared.

    masked tiles, full tiles   the loops with products; "tiles" where there is one
    loads                      the producer's loop
    a > b                      loop b within loop a, whose instructions do not count for a
    waits                      loops that do nothing but wait for an mbarrier, by where they wait
"""

from __future__ import annotations

import difflib
import json
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

from .audit import disassemble, nvdisasm_release
from .compile import Compiled, Kernel
from .record import ROOT
from .sass import Function, Instruction, Loop, functions
from .versions import toolchain

STORED = ROOT / "tests" / "contracts" / "sass.json"
ACCEPT = "python -m cutedsl_fa3 contract --accept"

PRODUCTS = ("HGMMA", "UTCHMMA")
# By their whole mnemonic: what moves data, orders it, or takes a unit of its own.
WHOLE = frozenset(
    "HGMMA UTCHMMA UTCBAR UTCATOMSWS LDTM UTMALDG UTMASTG UTMACCTL UTMACMDFLUSH LDGSTS SYNCS BAR "
    "WARPGROUP DEPBAR LDGDEPBAR FENCE MEMBAR ELECT USETMAXREG NANOSLEEP WARPSYNC VOTE VOTEU SHFL "
    "LDG STG LDS STS LDSM STSM LDL STL LD ST ATOM ATOMS ATOMG RED REDUX MUFU R2UR CALL BPT".split()
)
# By their first word: the arithmetic of a score, whose modifiers say little.
FAMILIES = frozenset("FFMA FFMA2 FADD FADD2 FMUL FMUL2 FMNMX FSEL FSETP F2FP HFMA2 ISETP".split())
COMPARISONS = ("FSEL", "ISETP", "SEL", "FSETP")
TOTAL, WAITS = "instructions", "waits"
OUTSIDE = "outside loops"


class OtherCompiler(UserWarning):
    """Contracts were stored with another compiler than this one, so nothing is compared."""


@dataclass(frozen=True)
class Contract:
    """One cubin: what ptxas reports, and the instructions of each part of the code.

    `parts`: by the name of a loop, or `OUTSIDE`, the number of each instruction of interest, and of
    all under `TOTAL`.
    """

    resources: Mapping[str, int | list[str]]
    parts: Mapping[str, Mapping[str, int]]


def contract_of(compiled: Compiled) -> Contract:
    """The contract that this machine code keeps.

    Raises: AuditError, SassError where the code cannot be read.
    """
    resources = asdict(compiled.resources)
    resources["advisories"] = list(compiled.resources.advisories)
    return Contract(resources, parts_of(functions(disassemble(compiled.cubin))))


def part_named(parts: Iterable[str], loop: str) -> str:
    """The part that is this loop: of persistent CTAs it lies within the loop over work tiles.

    Raises: KeyError.
    """
    for part in parts:
        if part.rpartition(" > ")[2] == loop:
            return part
    raise KeyError(loop)


def parts_of(code: Iterable[Function]) -> dict[str, dict[str, int]]:
    """Instructions by loop; those of kernels without products are named so."""
    parts: dict[str, dict[str, int]] = {}
    beside = 0
    for function in code:
        prefix = ""
        if not _has(function.code, PRODUCTS):
            beside += 1
            prefix = f"kernel without products {beside}: "
        parts |= {prefix + name: counts for name, counts in _parts(function).items()}
    return parts


def _parts(function: Function) -> dict[str, dict[str, int]]:
    everything = frozenset(range(len(function.blocks)))
    parts = {OUTSIDE: _counted(function, everything, function.loops)}
    for name, loop in _named(function, function.loops, ""):
        parts[name] = _counted(function, loop.blocks, loop.inner)
    return parts


def _counted(function: Function, blocks: frozenset[int], inner: tuple[Loop, ...]) -> dict[str, int]:
    """The instructions of interest in these blocks outside the loops within, and the waits."""
    code = list(function.instructions(blocks.difference(*(loop.blocks for loop in inner))))
    counts = Counter(filter(None, map(_counted_as, code)))
    waits = sum(_waits(function, loop) for loop in inner)
    return {TOTAL: len(code), **dict(sorted(counts.items()))} | ({WAITS: waits} if waits else {})


def _counted_as(this: Instruction) -> str | None:
    if this.family in WHOLE:
        return this.opcode
    return this.family if this.family in FAMILIES else None


def _named(function: Function, loops: tuple[Loop, ...], parent: str) -> Iterator[tuple[str, Loop]]:
    """Loops by what they do, those of one kind in the order of their addresses."""
    real = [loop for loop in loops if not _waits(function, loop) and not _trap(function, loop)]
    kinds = [_kind(function, loop) for loop in real]
    for kind in dict.fromkeys(kinds):
        alike = [loop for loop, its in zip(real, kinds, strict=True) if its == kind]
        names = [kind] if len(alike) == 1 else [f"{kind} {n}" for n in range(1, len(alike) + 1)]
        if kind == "tiles" and len(alike) == 2:
            # A mask is a comparison and a selection an element, so its loop has more of them.
            alike.sort(key=lambda loop: -_comparisons(function, loop))
            names = ["masked tiles", "full tiles"]
        for name, loop in zip(names, alike, strict=True):
            yield parent + name, loop
            yield from _named(function, loop.inner, f"{parent}{name} > ")


def _kind(function: Function, loop: Loop) -> str:
    code = list(function.instructions(loop.blocks))
    if _has(code, PRODUCTS):
        return "tiles"
    if _has(code, ("UTMALDG",)):
        return "loads"
    return "register request" if _has(code, ("USETMAXREG",)) else "loop"


def _has(code: Iterable[Instruction], families: tuple[str, ...]) -> bool:
    return any(this.family in families for this in code)


def _comparisons(function: Function, loop: Loop) -> int:
    return sum(this.family in COMPARISONS for this in function.instructions(loop.own))


def _waits(function: Function, loop: Loop) -> bool:
    """Whether a loop only asks an mbarrier again and again."""
    if loop.inner:
        return False
    watched = {this.opcode for this in function.instructions(loop.blocks) if _counted_as(this)}
    polls = {opcode for opcode in watched if opcode.startswith("SYNCS.PHASECHK")}
    return bool(polls) and watched <= polls | {"NANOSLEEP.SYNCS"}


def _trap(function: Function, loop: Loop) -> bool:
    """Whether a loop is the branch to itself behind the end of the code."""
    return all(this.family == "BRA" for this in function.instructions(loop.blocks))


def differences(before: Contract, after: Contract) -> list[str]:
    """What is different, one line for the resources and one for each part."""
    lines = []
    if changed := _changed(before.resources, after.resources):
        lines.append(changed)
    for name in dict.fromkeys((*before.parts, *after.parts)):
        old, new = before.parts.get(name), after.parts.get(name)
        if old is None or new is None:
            state = "new" if old is None else "gone"
            lines.append(f"{name}: {state}, {(old or new or {})[TOTAL]} instructions")
        elif changed := _changed(old, new):
            lines.append(f"{name}: {changed}")
    return lines


def _changed(before: Mapping, after: Mapping) -> str:
    names = dict.fromkeys((*before, *after))
    pairs = ((n, before.get(n, 0), after.get(n, 0)) for n in names)
    return "; ".join(f"{n} {_said(a)} -> {_said(b)}" for n, a, b in pairs if a != b)


def _said(value: int | list[str]) -> str:
    return str(value) if isinstance(value, int) else "none" if not value else "; ".join(value)


@dataclass(frozen=True)
class Contracts:
    """Contracts by the names of `shipped`, and the compiler that they are of."""

    compiler: str
    kernels: Mapping[str, Contract]

    @classmethod
    def read(cls, path: Path | None = None) -> Contracts:
        """The contracts of a file, by default `STORED`; none of no compiler where there is none."""
        path = path or STORED
        if not path.exists():
            return cls("", {})
        content = json.loads(path.read_text())
        kernels = {
            name: Contract(resources, {part: _counts(text) for part, text in parts.items()})
            for name, (resources, parts) in content["kernels"].items()
        }
        return cls(content["compiler"], kernels)

    def write(self, path: Path | None = None) -> Path:
        """Write as JSON, a part a line, so that what changes in a file is what changed in code."""
        path = path or STORED
        blocks = []
        for name, contract in sorted(self.kernels.items()):
            parts = ",\n".join(
                f"      {json.dumps(part)}: {json.dumps(_text(counts))}"
                for part, counts in contract.parts.items()
            )
            resources = json.dumps(dict(contract.resources))
            blocks.append(f"    {json.dumps(name)}: [{resources}, {{\n{parts}\n    }}]")
        kernels = ",\n".join(blocks)
        compiler = json.dumps(self.compiler)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f'{{\n  "compiler": {compiler},\n  "kernels": {{\n{kernels}\n  }}\n}}\n')
        return path


def _text(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.items())


def _counts(text: str) -> dict[str, int]:
    pairs = (part.rpartition(" ") for part in text.split(", "))
    return {name: int(count) for name, _, count in pairs}


def tools() -> str:
    """What contracts are of: the compiler here, and what its code is read with."""
    return f"{toolchain().compiler}, nvdisasm {nvdisasm_release()}"


@cache
def _stored() -> Contracts:
    return Contracts.read()


def broken(name: str, compiled: Compiled, stored: Contracts | None = None) -> str:
    """What a kernel's code is now and was not when it was accepted; empty if nothing, or unknown.

    With a compiler other than the one of the contracts it warns `OtherCompiler` and is empty.
    """
    stored = _stored() if stored is None else stored
    here = tools()
    if stored.compiler != here:
        warnings.warn(
            f"contracts are of {stored.compiler or 'no compiler'} and this is {here}: the machine "
            "code is not compared",
            OtherCompiler,
            stacklevel=2,
        )
        return ""
    if name not in stored.kernels:
        near = difflib.get_close_matches(name, stored.kernels, 1)
        beside = f", the nearest name is {near[0]}" if near else ""
        return f"{name}: no contract is stored{beside}; see it with {ACCEPT}"
    lines = differences(stored.kernels[name], contract_of(compiled))
    if not lines:
        return ""
    return "\n  ".join([f"{name} (to keep it so: {ACCEPT})", *lines])


@cache
def shipped() -> dict[str, Kernel]:
    """Each kernel that has a contract: configurations of forward and backward, and the GEMMs."""
    import cutlass

    from . import configs, configs_backward, gemm
    from .kernels.sm90.gemm import GemmSm90
    from .kernels.sm100.gemm import GemmSm100
    from .pipelines import Schedule

    def sm90(element: type, *tile: int, cluster: tuple[int, int] = (1, 1)) -> Kernel:
        return GemmSm90(Schedule(*tile, overlap="none", cluster=cluster), element)

    def sm100(element: type, *tile: int, cluster: tuple[int, int] = (1, 1)) -> Kernel:
        return GemmSm100(Schedule(*tile, consumers=1, overlap="none", cluster=cluster), element)

    bf16, fp16 = cutlass.BFloat16, cutlass.Float16
    gemms = [GemmSm90(gemm.DEFAULT, bf16), GemmSm90(gemm.DEFAULT, fp16)]
    for cluster in ((1, 1), (2, 1), (1, 2)):
        gemms += [sm90(bf16, 128, 128, stages, 2, cluster=cluster) for stages in (1, 2, 3, 4)]
    gemms += [sm90(fp16, *tile) for tile in ((128, 256, 2, 2), (64, 128, 2, 1), (192, 64, 2, 3))]
    gemms += [sm100(bf16, 128, 128, stages) for stages in (1, 2, 3, 4, 6)]
    gemms += [sm100(fp16, 128, 256, 2), sm100(bf16, 256, 128, 2)]
    gemms += [sm100(bf16, 128, 48, 2, cluster=(2, 1)), sm100(bf16, 128, 128, 2, cluster=(1, 2))]
    forwards = [plan.kernel for plan in configs.every()]
    backwards = [plan.kernel for plan in configs_backward.configs().values()]
    kernels = [*forwards, *backwards, *gemms]
    return {label(kernel): kernel for kernel in kernels}


def label(kernel: Kernel) -> str:
    """The name of a kernel's contract."""
    from . import configs, configs_backward
    from .plans_backward import BackwardPlan

    if (plan := getattr(kernel, "plan", None)) is not None:
        if isinstance(plan, BackwardPlan):
            return f"backward {configs_backward.label(plan)}"
        return f"forward {configs.label(plan)}"
    s, dtype = kernel.schedule, {"BFloat16": "bf16", "Float16": "fp16"}[kernel.dtype.__name__]
    cluster = "x".join(map(str, s.cluster))
    return (
        f"{kernel.name} {dtype} {s.tile_m}x{s.tile_n} stages {s.stages} consumers {s.consumers} "
        f"cluster {cluster}"
    )
