"""Reads PTX far enough to follow every path through a kernel.

Shared memory is written through the generic proxy by threads and read through the async proxy by
the copy engine and the tensor cores; only `fence.proxy.async` between the two orders them.
`unfenced` follows each path from a write to the readers that it can reach.

Source: PTX ISA, "Async proxy" and "membar/fence".
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import cutlass.cute as cute

from cutedsl_fa3.compile import DSL_LOCK

Scope = tuple[int, ...]

FENCES = ("fence.proxy.async", "fence.proxy.async.shared::cta", "fence.proxy.async.shared::cluster")
STORES = re.compile(r"cp\.(reduce\.)?async\.bulk\.([\w:]+\.)*?global\.shared::cta\b")
PRODUCTS = re.compile(r"wgmma\.mma_async\b|tcgen05\.(mma|cp)\b")
ENDS = ("ret", "exit", "trap")

_SPACES = ("global", "local", "param", "const", "shared", "shared::cta", "shared::cluster")
_TOKEN = re.compile(
    r"\s*(?:(?P<open>\{)|(?P<close>\})|(?P<label>[\w$]+)\s*:(?!:)"
    r"|(?P<code>(?:[^;{}]|\{[^{}]*\})+;))"
)
_CODE = re.compile(r"(?P<guard>@!?%?\w+\s+)?(?P<op>\S+)\s*(?P<operands>.*);$", re.DOTALL)


@dataclass(frozen=True)
class Instruction:
    """One instruction: `guarded` by a predicate or not, in the `scope` that its labels are of."""

    op: str
    operands: str
    guarded: bool
    scope: Scope

    @property
    def writes_shared(self) -> bool:
        """Whether it may write shared memory through the generic proxy."""
        head, *parts = self.op.split(".")
        if head == "stmatrix" or (head == "cp" and parts[0] == "async" and parts[1] != "bulk"):
            return parts[-1] not in ("commit_group", "wait_group", "wait_all")
        if head not in ("st", "atom", "red"):
            return False
        spaces = [part for part in parts if part in _SPACES]
        return not spaces or spaces[0].startswith("shared")  # without a space it may be any


def of_kernel(kernel: Any) -> str:
    """The PTX of a kernel as the compiler hands it to ptxas."""
    with DSL_LOCK, tempfile.TemporaryDirectory() as folder:
        options = f"--gpu-arch {kernel.arch} --enable-tvm-ffi --keep-ptx --dump-dir {folder}"
        made = cute.compile(kernel.host, *kernel.fake_args(), options=options, no_jit_engine=True)
        text = made.__ptx__
    return text if isinstance(text, str) else text.decode()


def bodies(ptx: str) -> Iterator[str]:
    """The code of each kernel.

    Raises: ValueError for functions that are called, which no path here would enter.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.DOTALL)
    if re.search(r"\.func\b", text):
        raise ValueError("the module holds functions beside kernels")
    for found in re.finditer(r"\.entry\s+[\w$]+\s*\([^)]*\)[^{;]*\{", text):
        depth, end = 1, found.end()
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        yield text[found.end() : end - 1]


class Flow:
    """The instructions of one kernel and which may follow which.

    Raises: ValueError for text that is no sequence of statements, and for indirect branches.
    """

    def __init__(self, body: str) -> None:
        self.code: list[Instruction] = []
        self.labels: dict[tuple[Scope, str], int] = {}
        scope, opened, at = (), 0, 0
        body = body.rstrip()
        while at < len(body):
            token = _TOKEN.match(body, at)
            if token is None:
                raise ValueError(f"no statement: {body[at : at + 80]!r}")
            at = token.end()
            if token["open"]:
                opened += 1
                scope = (*scope, opened)
            elif token["close"]:
                scope = scope[:-1]
            elif token["label"]:
                self.labels[scope, token["label"]] = len(self.code)
            else:
                self._add(token["code"], scope)

    def _add(self, text: str, scope: Scope) -> None:
        parts = _CODE.match(text.strip())
        if parts is None or parts["op"].startswith("."):
            return
        if parts["op"].startswith("brx"):
            raise ValueError(f"an indirect branch: {text.strip()}")
        operands = " ".join(parts["operands"].split())
        self.code.append(Instruction(parts["op"], operands, bool(parts["guard"]), scope))

    def after(self, at: int) -> list[int]:
        """The instructions that may run after the one at this place."""
        this = self.code[at]
        following = [at + 1] if at + 1 < len(self.code) else []
        name = this.op.partition(".")[0]
        if name in ENDS:
            return following if this.guarded else []
        if name == "bra":
            return [*(following if this.guarded else []), *self._target(this)]
        return following

    def _target(self, branch: Instruction) -> list[int]:
        for depth in range(len(branch.scope), -1, -1):
            place = self.labels.get((branch.scope[:depth], branch.operands))
            if place is not None:
                return [place] if place < len(self.code) else []
        raise ValueError(f"no label {branch.operands}")

    def unfenced(self, readers: re.Pattern[str]) -> list[Instruction]:
        """Readers that some path reaches from a write to shared memory without a fence between."""
        may: set[int] = set()  # instructions before which shared memory may hold unfenced writes
        todo = [i for i, this in enumerate(self.code) if this.writes_shared]
        while todo:
            for i in self.after(todo.pop()):
                fenced = self.code[i].op in FENCES and not self.code[i].guarded
                if i not in may and not fenced:
                    may.add(i)
                    todo.append(i)
        return [self.code[i] for i in sorted(may) if readers.match(self.code[i].op)]

    def count(self, readers: re.Pattern[str]) -> int:
        """How many such instructions there are."""
        return sum(bool(readers.match(this.op)) for this in self.code)
