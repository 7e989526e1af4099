"""One small case of each kind of kernel, for tools that make every instruction slow.

    python tests/kernels/small_cases.py --compile    # all kernels into the disk cache; needs no GPU
    python tests/kernels/small_cases.py              # run all on an SM90 GPU and hold them to fp64

Inputs are drawn on the CPU and results compared there, so that nothing runs on the GPU besides the
kernels themselves. `sanitize.py` runs this under compute-sanitizer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

import cutedsl_fa3 as fa3
from cutedsl_fa3 import backward, cache, calls_backward, ladder, masks, reference, scores
from cutedsl_fa3.gemm import ELEMENTS, gemm
from cutedsl_fa3.kernels.sm90.gemm import GemmSm90
from cutedsl_fa3.pipelines import Schedule
from cutedsl_fa3.plans_backward import BackwardPlan
from cutedsl_fa3.problem import DTYPES

TAILS = (1, 200, 300, 2, 1)  # batch, seqlen_q, seqlen_k, heads, kv_heads: no length fills its tiles
ROUNDINGS = 1.25  # of P and of the output; a quarter more for fp32 sums and the exponential


class WrongCase(AssertionError):
    """A result is farther from fp64 than roundings explain."""


def drawn(seed: int, *shape: int) -> torch.Tensor:
    """Normally distributed fp32 on the CPU."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def documents(device: str) -> torch.Tensor:
    """Which document each position of a sequence belongs to."""
    return (torch.arange(400, dtype=torch.int32) // 70).to(device)


def plain(device: str) -> fa3.Variant:
    return fa3.Variant()


def causal(device: str) -> fa3.Variant:
    return fa3.Variant(mask=masks.causal)


def window(device: str) -> fa3.Variant:
    return fa3.Variant(mask=masks.window(90, 20))


def prefix(device: str) -> fa3.Variant:
    return fa3.Variant(mask=masks.or_masks(masks.prefix(70), masks.causal))


def nothing_seen(device: str) -> fa3.Variant:
    return fa3.Variant(mask=lambda b, h, q, k: k < 0)


def alibi(device: str) -> fa3.Variant:
    slopes = torch.tensor([0.25, 0.0625], device=device)
    return fa3.Variant(scores.alibi(slopes), masks.causal)


def softcap(device: str) -> fa3.Variant:
    return fa3.Variant(scores.softcap(20.0), masks.causal)


def bias(device: str) -> fa3.Variant:
    table = drawn(7, 2, 800).to(device)
    return fa3.Variant(lambda s, b, h, q, k: s + table[h, k - q + 400])


def same_document(device: str) -> fa3.Variant:
    of = documents(device)
    return fa3.Variant(mask=lambda b, h, q, k: (of[q] == of[k]) & (k <= q))


def runtime_scalar(device: str) -> fa3.Variant:
    end = torch.tensor(130, device=device)
    return fa3.Variant(mask=lambda b, h, q, k: k < end)


def everything(device: str) -> fa3.Variant:
    """A score and a mask, each with loads by element and by head."""
    of, slopes = documents(device), torch.tensor([0.25, 0.0625], device=device)
    weights = drawn(8, 400).to(device)
    return fa3.Variant(
        lambda s, b, h, q, k: s + slopes[h] * (k - q) + weights[k],
        lambda b, h, q, k: (of[q] == of[k]) & (k <= q + 100),
    )


def strided_blocks(device: str) -> fa3.Variant:
    return fa3.Variant(mask=lambda b, h, q, k: ((k // 64) % 2 == 0) & (k <= q + 100))


def sink(device: str) -> fa3.Variant:
    sinks = torch.tensor([1.5, -0.5], device=device)
    return fa3.Variant(mask=masks.causal, softmax=fa3.OnlineSoftmax(sinks))


def sigmoid(device: str) -> fa3.Variant:
    return fa3.Variant(mask=masks.causal, softmax=fa3.Elementwise(torch.sigmoid))


def gated(device: str) -> fa3.Variant:
    gates = drawn(9, 2, 400).to(device)
    return fa3.Variant(
        mask=masks.causal, epilogue=lambda o, lse, b, h, q: o * torch.sigmoid(gates[h, q])
    )


@dataclass(frozen=True)
class Attention:
    """A forward small enough to be run instruction by instruction.

    Shape: `sizes` is (batch, seqlen_q, seqlen_k, heads, kv_heads).
    `spoilt`: a key that no query sees, whose values are NaN.
    """

    name: str
    variant: Callable[[str], fa3.Variant] = causal
    head_dims: tuple[int, int] = (64, 64)
    sizes: tuple[int, int, int, int, int] = TAILS
    dtype: str = "bf16"
    schedule: Schedule | None = None
    spoilt: int | None = None

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v on the CPU."""
        batch, seqlen_q, seqlen_k, heads, kv_heads = self.sizes
        head_dim, head_dim_v = self.head_dims
        shapes = (seqlen_q, heads, head_dim), (seqlen_k, kv_heads, head_dim)
        shapes = (*shapes, (seqlen_k, kv_heads, head_dim_v))
        q, k, v = (drawn(i, batch, *shape).to(DTYPES[self.dtype]) for i, shape in enumerate(shapes))
        return q, k, v

    def kernel(self) -> Any:
        """The kernel that `run` launches."""
        return fa3.plan(*self.inputs(), self.variant("cpu"), schedule=self.schedule).kernel

    def run(self) -> torch.Tensor:
        """The output of the GPU, on the CPU."""
        q, k, v = (t.cuda() for t in self.inputs())
        if self.spoilt is not None:
            v[:, self.spoilt] = torch.nan
        return fa3.attention(q, k, v, self.variant("cuda"), schedule=self.schedule).cpu()

    def verify(self, out: torch.Tensor) -> None:
        """Hold every element against fp64: P and the output are rounded once each.

        Raises: WrongCase.
        """
        (q, k, v), variant = self.inputs(), self.variant("cpu")
        exact = reference.attention(q, k, v, variant, dtype=torch.float64)
        weights = reference.attention(q, k, v.abs(), variant, dtype=torch.float64)
        unit = torch.finfo(q.dtype).eps / 2
        _hold(self.name, out, exact, ROUNDINGS * unit * (weights + exact.abs()))


@dataclass(frozen=True)
class Climb(Attention):
    """A step of the ladder whose kernel is not the forward's own."""

    step: int = 1

    def rung(self, device: str = "cpu") -> ladder.Rung:
        """The step for this case's variant and head size."""
        found = ladder.rungs(self.variant(device), self.head_dims[0], self.dtype)
        return next(rung for rung in found if rung.number == self.step)

    def kernel(self) -> Any:
        """The kernel that `run` launches."""
        return self.rung().kernel

    def run(self) -> torch.Tensor:
        """The output of the GPU, on the CPU."""
        q, k, v = (t.cuda() for t in self.inputs())
        return ladder.launched(self.rung("cuda"), q, k, v)()[0].cpu()


@dataclass(frozen=True)
class Backward:
    """The gradients of a small forward, whose output and LSE are computed on the CPU.

    `wanted`: numbers of the captured tensors whose gradients the kernel adds up.
    """

    forward: Attention
    wanted: tuple[int, ...] = ()
    deterministic: bool = False

    @property
    def name(self) -> str:
        order = " in a fixed order" if self.deterministic else ""
        return f"gradients{order}: {self.forward.name}"

    def kernel(self) -> Any:
        """The kernel that `run` launches."""
        problem = fa3.Problem(self.forward.dtype, *self.forward.head_dims)
        plan = BackwardPlan.default(
            self.forward.variant("cpu"),
            problem,
            deterministic=self.deterministic,
            wanted=() if self.deterministic else self.wanted,
        )
        return plan.kernel

    def given(self, dtype: torch.dtype) -> tuple[torch.Tensor | None, ...]:
        """q, k, v, output, LSE and the output's gradient on the CPU, computed in fp64."""
        (q, k, v), variant = self.forward.inputs(), self.forward.variant("cpu")
        do = drawn(5, *q.shape[:3], v.shape[3]).to(q.dtype)
        if variant.has_lse:
            o, lse = reference.attention_with_lse(q, k, v, variant, dtype=torch.float64)
            lse = lse.to(torch.float64 if dtype == torch.float64 else torch.float32)
        else:
            o, lse = reference.attention(q, k, v, variant, dtype=torch.float64), None
        return *(t.to(dtype) for t in (q, k, v, o)), lse, do.to(dtype)

    def run(self) -> torch.Tensor:
        """The gradients of the GPU, one after the other, on the CPU."""
        given = (None if t is None else t.cuda() for t in self.given(DTYPES[self.forward.dtype]))
        found = calls_backward.backward(
            *given,  # type: ignore[arg-type]
            self.forward.variant("cuda"),
            wanted=self.wanted,
            deterministic=self.deterministic,
        )
        return _in_one(found).cpu()

    def twins(self, dtype: torch.dtype) -> torch.Tensor:
        """What the CPU computes in this type."""
        q, k, v, o, lse, do = self.given(dtype)
        scale = q.shape[3] ** -0.5
        variant = self.forward.variant("cpu")
        found = backward.run(q, k, v, variant, o, lse, do, scale=scale, wanted=self.wanted)
        return _in_one(found)

    def verify(self, out: torch.Tensor) -> None:
        """Hold every element against fp64: at most twice the twin's error, plus one rounding.

        Raises: WrongCase.
        """
        exact, rounded = (self.twins(t) for t in (torch.float64, DTYPES[self.forward.dtype]))
        eps = torch.finfo(DTYPES[self.forward.dtype]).eps
        allowed = 2 * (rounded.double() - exact).abs().max() + eps * exact.abs().max()
        _hold(self.name, out, exact, allowed.expand_as(exact))


def _in_one(found: backward.Gradients) -> torch.Tensor:
    """Gradients one after the other."""
    parts = (found.q, found.k, found.v, *found.captures.values())
    return torch.cat([t.double().flatten() for t in parts])


@dataclass(frozen=True)
class Gemm:
    """C = A @ B^T of a few ragged tiles."""

    name: str
    schedule: Schedule
    dtype: str = "bf16"
    sizes: tuple[int, int, int] = field(default=(200, 264, 136))

    def inputs(self) -> tuple[torch.Tensor, torch.Tensor]:
        """a, b on the CPU."""
        m, n, k = self.sizes
        return drawn(0, m, k).to(DTYPES[self.dtype]), drawn(1, n, k).to(DTYPES[self.dtype])

    def kernel(self) -> Any:
        """The kernel that `run` launches."""
        return GemmSm90(self.schedule, ELEMENTS[DTYPES[self.dtype]])

    def run(self) -> torch.Tensor:
        """The output of the GPU, on the CPU."""
        a, b = (t.cuda() for t in self.inputs())
        return gemm(a, b, self.schedule).cpu()

    def verify(self, out: torch.Tensor) -> None:
        """Hold every element against fp64: sums are fp32, the output is rounded once.

        Raises: WrongCase.
        """
        a, b = (t.double() for t in self.inputs())
        exact, sums = a @ b.T, a.abs() @ b.abs().T
        unit = torch.finfo(DTYPES[self.dtype]).eps / 2
        _hold(self.name, out, exact, unit * exact.abs() + self.sizes[2] * 2.0**-23 * sums)


def _hold(name: str, out: torch.Tensor, exact: torch.Tensor, allowed: torch.Tensor) -> None:
    error = (out.double() - exact).abs()
    wrong = ~(error <= allowed)  # NaN is wrong
    if wrong.any():
        worst = (error - allowed).nan_to_num(torch.inf).argmax()
        raise WrongCase(
            f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong; the worst has "
            f"error {error.flatten()[worst]:.3g}, allowed is {allowed.flatten()[worst]:.3g}"
        )


def _attention_cases() -> list[Attention]:
    cases = []
    for dim in (64, 128):
        dims = (dim, dim)
        for overlap in ("none", "intra", "pingpong", "both"):
            schedule = Schedule(128, 64, 2, 2, overlap)
            cases.append(Attention(f"overlap {overlap}, d{dim}", causal, dims, schedule=schedule))
        cases.append(Attention(f"one stage, d{dim}", schedule=Schedule(128, 64, 1), head_dims=dims))
        for variant in (plain, window, alibi, same_document, everything):
            name = variant.__name__.replace("_", " ")
            cases.append(Attention(f"{name}, d{dim}", variant, dims))
        cases.append(Attention(f"fp16, d{dim}", head_dims=dims, dtype="fp16"))
    return [
        *cases,
        Attention("prefix", prefix),
        Attention("softcap", softcap),
        Attention("bias table", bias),
        Attention("runtime scalar", runtime_scalar),
        Attention("head_dim 64, 128", head_dims=(64, 128)),
        Attention("head_dim 128, 64", head_dims=(128, 64)),
        *(Attention(f"head_dim {d}", head_dims=(d, d)) for d in (72, 96, 192, 256)),
        Attention("head_dim 192, 128", head_dims=(192, 128)),
        Attention("strided blocks", strided_blocks),
        Attention("sink", sink),
        Attention("sigmoid", sigmoid),
        Attention("gated", gated),
        Attention("spoilt value", runtime_scalar, sizes=(1, 70, 150, 2, 1), spoilt=140),
        Attention("one warpgroup", schedule=Schedule(64, 64, 3, 1, "intra")),
        Attention("three warpgroups", schedule=Schedule(192, 64, 2, 3, "both")),
        Attention("grouped heads", sizes=(2, 130, 100, 6, 2)),
        Attention(
            "two heads in a tile",
            alibi,
            sizes=(2, 50, 150, 2, 1),
            schedule=Schedule(128, 64, 2, 2, "intra", pack=2),
        ),
        Attention(
            "sixteen heads in a tile",
            same_document,
            sizes=(1, 13, 150, 16, 1),
            schedule=Schedule(128, 64, 2, 2, "both", store="direct", pack=16),
        ),
        Attention("one key head", plain, (128, 128), sizes=(1, 65, 129, 5, 1)),
        Attention("empty rows", sizes=(1, 300, 90, 2, 2)),
        Attention("nothing seen", nothing_seen),
        Attention("one query, one key", plain, sizes=(1, 1, 1, 1, 1)),
        Attention("whole tiles", plain, (128, 128), sizes=(1, 256, 256, 1, 1)),
    ]


def _ladder_cases() -> list[Attention]:
    return [
        Climb(f"ladder step {step}, d{dim}", variant, (dim, dim), step=step)
        for step, variant in ((1, causal), (2, plain), (3, causal), (4, plain))
        for dim in (64, 128)
    ]


def _backward_cases() -> list[Backward]:
    found = []
    for dim in (64, 128):
        dims = (dim, dim)
        found += [
            Backward(Attention(f"causal, d{dim}", causal, dims)),
            Backward(Attention(f"causal, d{dim}", causal, dims), deterministic=True),
            Backward(Attention(f"slopes, d{dim}", alibi, dims), wanted=(0,)),
            Backward(Attention(f"softcap, d{dim}", softcap, dims)),
        ]
    return [
        *found,
        Backward(Attention("bias table", bias, dtype="fp16"), wanted=(0,)),
        Backward(Attention("documents", same_document, (128, 128))),
        Backward(Attention("sigmoid", sigmoid)),
        Backward(Attention("head_dim 40, 72", plain, (40, 72))),
        Backward(Attention("grouped heads", window, sizes=(2, 130, 100, 6, 2))),
        Backward(Attention("empty rows", sizes=(1, 300, 90, 2, 2))),
        Backward(Attention("one query, one key", plain, sizes=(1, 1, 1, 1, 1))),
    ]


def _gemm_cases() -> list[Gemm]:
    def schedule(stages: int, *cluster: int, tile_n: int = 128) -> Schedule:
        return Schedule(128, tile_n, stages, 2, overlap="none", cluster=cluster)

    return [
        Gemm("gemm, cluster 1 x 1", schedule(2, 1, 1)),
        Gemm("gemm, cluster 2 x 1", schedule(2, 2, 1)),
        Gemm("gemm, cluster 1 x 2", schedule(2, 1, 2)),
        Gemm("gemm, one stage", schedule(1, 1, 1)),
        Gemm(
            "gemm, four stages of wide tiles", schedule(4, 2, 1, tile_n=256), sizes=(300, 520, 456)
        ),
        Gemm("gemm, fp16", schedule(3, 1, 1), "fp16"),
    ]


CASES: dict[str, Attention | Backward | Gemm] = {
    case.name: case
    for case in (*_attention_cases(), *_backward_cases(), *_ladder_cases(), *_gemm_cases())
}


def compile_case(name: str) -> str:
    """Put a case's kernel into the disk cache."""
    return cache.get(CASES[name].kernel()).name


def compile_all(workers: int) -> int:
    """Put every kernel into the disk cache; how many there are."""
    spawned = multiprocessing.get_context("spawn")  # the compiler does not survive a fork
    with ProcessPoolExecutor(workers, mp_context=spawned) as pool:
        return len(set(pool.map(compile_case, CASES)))


def main(arguments: list[str] | None = None) -> None:
    """Compile every case, or run and verify cases."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compile", action="store_true", help="compile only")
    workers = min(16, os.cpu_count() or 1)
    parser.add_argument("--workers", type=int, default=workers, help="compiling processes")
    parser.add_argument("names", nargs="*", help="the cases to run; all without")
    options = parser.parse_args(arguments)
    if options.compile:
        print(f"{compile_all(options.workers)} kernels of {len(CASES)} cases compiled")
        return
    names = options.names or list(CASES)
    for name in names:
        CASES[name].verify(CASES[name].run())
        print(f"right: {name}", flush=True)
    print(f"{len(names)} cases right")


if __name__ == "__main__":
    sys.exit(main())
