"""One call on disk: tensors, variant, plan, versions, and a script that compares it again.

    tensors.pt     q, k, v, the captured tensors and the result, with their strides and alignment
    variant.json   the variant's graphs, scale and schedule; variant.txt is the same to read
    plan.txt       what ran, and versions.txt with what
    mismatch.txt   what was wrong
    reproduce.py   runs it again: the kernel on a GPU, or the emulation of its plan on the CPU

A variant's functions are not kept, its graphs are: they are what every reader works from.
"""

from __future__ import annotations

import json
import platform
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from . import sampled
from .pipelines import Schedule
from .plans import Plan
from .variant import Elementwise, OnlineSoftmax, Variant
from .variant.graph import Graph, Node, Ref
from .variant.variant import ROLES

ALIGNMENT = 128  # bytes: how a tensor lies in so many decides by which loads a kernel reads it

SCRIPT = '''\
"""Runs this call again and holds it against fp64 in sampled rows.

    python reproduce.py cuda    the kernel
    python reproduce.py cpu     the emulation of its plan, for what is wrong in both

Exit 1 if the result is wrong again.
"""

import sys
from pathlib import Path

from cutedsl_fa3 import reproducer

case = reproducer.load(Path(__file__).parent, *sys.argv[1:2])
print("stored result:", case.compare(case.stored) or "right")
again = case.compare(case.run())
print(f"result on {case.q.device}:", again or "right")
sys.exit(again is not None)
'''


@dataclass(frozen=True)
class Case:
    """The arguments of one call and what it returned; `scale` is natural."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    variant: Variant
    scale: float
    schedule: Schedule | None
    stored: tuple[torch.Tensor, torch.Tensor | None]

    @property
    def plan(self) -> Plan:
        from .interface import plan

        return plan(self.q, self.k, self.v, self.variant, schedule=self.schedule)

    def run(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The call's result on the device of its tensors."""
        from . import interface

        options = {"scale": self.scale, "schedule": self.schedule}
        if self.variant.has_lse:
            return interface.attention_with_lse(self.q, self.k, self.v, self.variant, **options)
        return interface.attention(self.q, self.k, self.v, self.variant, **options), None

    def compare(self, result: tuple[torch.Tensor, torch.Tensor | None]) -> sampled.Mismatch | None:
        """The worst of what is wrong with a result of this call."""
        return sampled.compare(self.q, self.k, self.v, self.variant, self.scale, result)


def write(folder: Path, case: Case, what: str) -> Path:
    """Write a case into an existing, empty folder.

    Raises: OSError, RuntimeError where there is no room.
    """
    variant = case.variant
    files = {
        "mismatch.txt": what,
        "plan.txt": str(case.plan),
        "versions.txt": versions(case.q.device),
        "variant.txt": variant.text,
        "variant.json": json.dumps(
            {
                "graphs": {role: _as_data(graph) for role, graph in variant.graphs.items()},
                "sink": variant.sink,
                "scale": case.scale,
                "schedule": None if case.schedule is None else asdict(case.schedule),
            },
            indent=1,
        ),
        "reproduce.py": SCRIPT,
    }
    for name, text in files.items():
        (folder / name).write_text(text.rstrip("\n") + "\n")
    out, lse = case.stored
    tensors = {"q": case.q, "k": case.k, "v": case.v, "out": out, "lse": lse}
    tensors = {name: None if t is None else laid_out(t, "cpu") for name, t in tensors.items()}
    captures = [laid_out(t, "cpu") for t in variant.captures]
    torch.save({**tensors, "captures": captures}, folder / "tensors.pt")
    return folder


def load(folder: Path, device: str | None = None) -> Case:
    """The case in a folder, on this device: by default a GPU where there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tensors = torch.load(folder / "tensors.pt", weights_only=True)
    captures = tuple(laid_out(t, device) for t in tensors.pop("captures"))
    given = {n: None if t is None else laid_out(t, device) for n, t in tensors.items()}
    about = json.loads((folder / "variant.json").read_text())
    graphs = {role: _as_graph(data) for role, data in about["graphs"].items()}
    schedule = about["schedule"]
    if schedule is not None:
        schedule = Schedule(**{**schedule, "cluster": tuple(schedule["cluster"])})
    return Case(
        given["q"],
        given["k"],
        given["v"],
        variant_of(graphs, captures, about["sink"]),
        about["scale"],
        schedule,
        (given["out"], given["lse"]),
    )


def laid_out(t: torch.Tensor, device: str) -> torch.Tensor:
    """A copy with the same strides and the same place within `ALIGNMENT` bytes, of its own memory.

    What lies between its elements is copied too, and nothing beyond.
    """
    t = t.detach()
    if t.numel() == 0:
        return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=device)
    span = 1 + sum((size - 1) * stride for size, stride in zip(t.shape, t.stride(), strict=True))
    size = t.element_size()
    buffer = torch.empty(span + 2 * ALIGNMENT // size, dtype=t.dtype, device=device)
    offset = (t.data_ptr() - buffer.data_ptr()) % ALIGNMENT // size
    buffer[offset : offset + span] = t.as_strided((span,), (1,)).to(device)
    return buffer.as_strided(t.shape, t.stride(), buffer.storage_offset() + offset)


def variant_of(
    graphs: dict[str, Graph], captures: tuple[torch.Tensor, ...], sink: int | None
) -> Variant:
    """The variant of these graphs; its functions are gone, which nothing needs any more."""
    made = object.__new__(Variant)
    softmax = OnlineSoftmax(None if sink is None else captures[sink])
    values: dict[str, Any] = {role: graphs.get(role) for role in ROLES}
    values |= {"sink": sink, "captures": captures}
    values["softmax"] = Elementwise(_not_kept) if values["weight"] is not None else softmax
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made


def _not_kept(score: Any) -> Any:
    raise RuntimeError("a variant from a reproducer has its graphs and not their functions")


def _as_data(graph: Graph) -> dict[str, Any]:
    return {
        "nodes": [
            [n.op, [{"ref": a.id} if isinstance(a, Ref) else a for a in n.args], n.dtype,
             sorted(n.depends)]
            for n in graph.nodes
        ],
        "output": graph.output,
    }  # fmt: skip


def _as_graph(data: dict[str, Any]) -> Graph:
    nodes = (
        Node(
            op,
            tuple(Ref(a["ref"]) if isinstance(a, dict) else a for a in args),
            dtype,
            frozenset(depends),
        )
        for op, args, dtype, depends in data["nodes"]
    )
    return Graph(tuple(nodes), data["output"])


def versions(device: torch.device) -> str:
    """What ran here, a line each."""
    from .fingerprint import source_fingerprint
    from .versions import toolchain

    lines = [f"compiler {toolchain().compiler}", f"torch {torch.__version__}"]
    lines += [f"python {platform.python_version()} on {platform.platform()}"]
    lines += [f"device {torch.cuda.get_device_name(device) if device.type == 'cuda' else 'CPU'}"]
    lines += [f"CUDA of torch {torch.version.cuda}", f"sources {source_fingerprint()}"]
    return "\n".join(lines)
