"""What the compiler made of a kernel, held against what the kernel's tables promise.

An expectation comes from tiles, rings and roles (`kernel.expected()`), never from a cubin. Whatever
the tables say, no kernel here may spill, touch local memory, or draw ptxas' advice that its WGMMAs
were serialised or its fences and waits repaired.
"""

from __future__ import annotations

import functools
import importlib.metadata
import re
import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from .compile import Compiled, Kernel, Resources

if TYPE_CHECKING:  # auditing needs no DSL
    from cutedsl_fa3.pipelines.expect import Expect

_WHEEL = "nvidia-cuda-nvdisasm"
_INSTRUCTION = re.compile(
    r"^\s*/\*[0-9a-f]{4,}\*/\s+\{?\s*(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_]*(?:\.\w+)*)", re.MULTILINE
)
# C7502 ... C7519: wgmma serialised, warpgroup.arrive/wait injected, setmaxnreg ignored.
_SERIALISATION = re.compile(r"C75\d\d")


class AuditError(RuntimeError):
    """The machine code cannot be read."""


class AuditedKernel(Kernel, Protocol):
    """A kernel whose tables say what its machine code must hold."""

    @property
    def smem(self) -> Any:
        """The shared-memory plan: `total` bytes, printable."""
        ...

    def expected(self) -> tuple[Expect, ...]:
        """The promises that follow from the kernel's tables."""
        ...


@dataclass(frozen=True)
class Census:
    """How often each SASS mnemonic stands in a cubin, with all its modifiers."""

    counts: Mapping[str, int]

    def count(self, opcode: str) -> int:
        """Instructions whose mnemonic is `opcode` or starts with its dotted parts.

        "HGMMA.64x128x16" counts "HGMMA.64x128x16.F32.BF16", not "HGMMA.64x128x160".
        """
        return sum(
            number
            for mnemonic, number in self.counts.items()
            if mnemonic == opcode or mnemonic.startswith(opcode + ".")
        )

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def __str__(self) -> str:
        """The mnemonics by number."""
        ordered = sorted(self.counts.items(), key=lambda item: (-item[1], item[0]))
        return "\n".join(f"{number:6d}  {mnemonic}" for mnemonic, number in ordered)


@dataclass(frozen=True)
class Check:
    """One question asked of the machine code: what was wanted, what was found."""

    subject: str
    wanted: str
    found: str
    ok: bool
    why: str

    def __str__(self) -> str:
        verdict = "ok  " if self.ok else "FAIL"
        return f"{verdict}  {self.subject}: {self.found}, wanted {self.wanted} ({self.why})"


@dataclass(frozen=True)
class Report:
    """An audit as a page: resources, SMEM by buffer, every check with its verdict."""

    name: str
    arch: str
    resources: Resources
    smem: str
    census: Census
    checks: tuple[Check, ...]

    @property
    def ok(self) -> bool:
        return all(check.ok for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        return tuple(check for check in self.checks if not check.ok)

    def __str__(self) -> str:
        verdict = "ok" if self.ok else f"{len(self.failures)} of {len(self.checks)} checks FAIL"
        parts = [
            f"{self.name} for {self.arch}: {verdict}",
            "",
            "resources",
            _indented(str(self.resources)),
            *(f"  {advisory}" for advisory in self.resources.advisories),
            "",
            "shared memory",
            _indented(self.smem),
            "",
            f"checks of {self.census.total} instructions",
            *(f"  {check}" for check in self.checks),
        ]
        return "\n".join(parts)


def audit(kernel: AuditedKernel, compiled: Compiled) -> Report:
    """Hold `compiled` against the promises of `kernel` and the rules for every kernel.

    Raises: AuditError where the cubin cannot be disassembled.
    """
    census = take_census(compiled.cubin)
    promised = tuple(_against(expect, census) for expect in kernel.expected())
    return Report(
        name=compiled.name,
        arch=compiled.arch,
        resources=compiled.resources,
        smem=str(kernel.smem),
        census=census,
        checks=(
            *promised,
            *_always(compiled.resources, census, int(kernel.smem.total)),
            *_register_budget(kernel, compiled.resources.registers),
        ),
    )


def _against(expect: Expect, census: Census) -> Check:
    found = census.count(expect.opcode)
    wanted = expect.rule if expect.rule == "none" else f"{expect.rule} {expect.count}"
    return Check(expect.opcode, wanted, str(found), expect.holds(found), expect.why)


def _always(resources: Resources, census: Census, planned_smem: int) -> tuple[Check, ...]:
    local = census.count("LDL") + census.count("STL")
    serialised = [line for line in resources.advisories if _SERIALISATION.match(line)]
    asked = resources.smem_dynamic
    return (
        Check("spills", "0 B", f"{resources.spills} B", resources.spills == 0, "every kernel"),
        Check("LDL, STL", "none", str(local), local == 0, "every kernel: no local memory"),
        Check(
            "C75xx advisories",
            "none",
            "; ".join(serialised) or "none",
            not serialised,
            "every kernel: no serialised WGMMA, no repaired fence, wait or setmaxnreg",
        ),
        Check(
            "dynamic SMEM",
            f"at most {planned_smem} B",
            f"{asked} B",
            asked <= planned_smem,
            "the SMEM plan covers what the launch asks for",
        ),
    )


def _register_budget(kernel: AuditedKernel, launched: int) -> tuple[Check, ...]:
    """That the roles ask for no more registers than the launch of this machine code grants."""
    roles = getattr(kernel, "roles", None)
    if not roles:
        return ()
    from .pipelines.roles import check_registers, registers_asked, threads
    from .pipelines.schedule import ScheduleError

    try:
        check_registers(roles, launched=launched)
        found, ok = str(registers_asked(roles, launched)), True
    except ScheduleError as error:
        found, ok = str(error), False
    wanted = f"at most {launched} x {threads(roles)} = {launched * threads(roles)} in all"
    why = "setmaxnreg moves only what the launch grants: ptxas' registers x threads"
    return (Check("role registers", wanted, found, ok, why),)


def take_census(cubin: bytes) -> Census:
    """Disassemble a cubin and count its instructions.

    Raises: AuditError.
    """
    return census_of(disassemble(cubin))


def census_of(sass: str) -> Census:
    """Count the instructions of nvdisasm's text.

    Raises: AuditError where there are none: an empty census would agree with every "none".
    """
    counts = Counter(_INSTRUCTION.findall(sass))
    if not counts:
        raise AuditError(f"no instruction in the disassembly, which begins: {sass[:200]!r}")
    return Census(counts)


@functools.lru_cache(maxsize=2)  # an audit and a contract read the same cubin
def disassemble(cubin: bytes) -> str:
    """The SASS text of a cubin.

    Raises: AuditError.
    """
    tool = find_nvdisasm()
    with tempfile.TemporaryDirectory(prefix="cutedsl_fa3_") as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        result = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=False)
    if result.returncode != 0:
        message = result.stderr.strip().replace(str(path), "the cubin")
        raise AuditError(f"{tool} cannot read the cubin ({len(cubin)} bytes): {message}")
    return result.stdout


@functools.cache
def nvdisasm_release() -> str:
    """The release of `find_nvdisasm()`, as in 13.5: another one may print other mnemonics.

    Raises: AuditError.
    """
    tool = find_nvdisasm()
    said = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False).stdout
    found = re.search(r"release (\d+\.\d+)", said)
    if found is None:
        raise AuditError(f"{tool} --version names no release: {said.strip()!r}")
    return found[1]


def find_nvdisasm() -> Path:
    """nvdisasm from its wheel, else from PATH.

    Raises: AuditError naming the pip command where there is neither.
    """
    try:
        files = importlib.metadata.files(_WHEEL) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.stem == "nvdisasm" and (located := Path(str(file.locate()))).is_file():
            return located
    if on_path := shutil.which("nvdisasm"):
        return Path(on_path)
    raise AuditError(f"nvdisasm is not installed: pip install {_WHEEL}")


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
