"""The backwards that the benchmark times side by side, each alone: its forward ran before.

| provider      | its gradients come from                                                         |
|---------------|---------------------------------------------------------------------------------|
| `cutedsl_fa3` | `calls_backward.backward`, of the output and LSE of `attention_with_lse`        |
| the others    | `torch.autograd.grad` on the graph of one forward (peers.py), which it retains  |

Nothing is subtracted from either. What autograd itself costs is time of the host, which runs ahead
of the GPU: a window begins when the first calls are queued.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from .errors import Unsupported
from .peers import OURS, PROVIDERS, Call, Inputs

Gradients = tuple[torch.Tensor, ...]  # of q, k, v, then of the captured tensors asked for


@dataclass(frozen=True)
class GradientInputs(Inputs):
    """A problem's tensors, the gradient of its output, and what is asked for besides.

    Shape: dout (batch, seqlen_q, heads, head_dim_v).
    """

    dout: torch.Tensor
    deterministic: bool = False
    captured: bool = False

    @cached_property
    def wanted(self) -> tuple[int, ...]:
        """The numbers of the captured tensors whose gradients are asked for."""
        from .backward import differentiable

        return tuple(sorted(differentiable(self.named.variant))) if self.captured else ()

    @property
    def leaves(self) -> tuple[torch.Tensor, ...]:
        """What gradients are asked of: q, k, v and captured tensors, which require them."""
        captures = self.named.variant.captures
        found = self.q, self.k, self.v, *(captures[n] for n in self.wanted)
        for t in found:
            t.requires_grad_()
        return found


@dataclass(frozen=True)
class GradientProvider:
    """A backward's name in records, the forward before it, and the gradients of what that gave.

    `forward` prepares a call; `gradients(inputs, what it returned, retain)` may be asked for more
    than once where it shall `retain` what it needs.
    """

    name: str
    forward: Callable[[GradientInputs], Call]
    gradients: Callable[[GradientInputs, Any, bool], Gradients]

    def prepare(self, inputs: GradientInputs) -> Call:
        """The backward alone, compiled.

        Raises: as `Provider.prepare`; Unsupported for what is asked for besides.
        """
        call = partial(self.gradients, inputs, self.forward(inputs)(), True)
        # A backward by torch.compile is compiled for the first call, which retains as all others.
        call()
        return call

    def whole(self, inputs: GradientInputs) -> Call:
        """Forward and backward, as a step of training has them.

        Raises: as `prepare`.
        """
        forward = self.forward(inputs)
        return lambda: self.gradients(inputs, forward(), False)


def _forward(inputs: GradientInputs) -> Call:
    from .interface import attention, attention_with_lse

    variant, given = inputs.named.variant, _detached(inputs)

    def call() -> tuple[torch.Tensor, torch.Tensor | None]:
        with torch.no_grad():
            if variant.has_lse:
                return attention_with_lse(*given, variant)
            return attention(*given, variant), None

    return call


def _backward(
    inputs: GradientInputs, kept: tuple[torch.Tensor, torch.Tensor | None], retain: bool
) -> Gradients:
    from .calls_backward import backward

    with torch.no_grad():
        found = backward(
            *_detached(inputs), *kept, inputs.dout, inputs.named.variant,
            wanted=inputs.wanted, deterministic=inputs.deterministic,
        )  # fmt: skip
    return found.q, found.k, found.v, *(found.captures[n] for n in inputs.wanted)


def _detached(inputs: GradientInputs) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """q, k and v, which a peer may have made leaves of its graph."""
    return inputs.q.detach(), inputs.k.detach(), inputs.v.detach()


def _forward_of(name: str, inputs: GradientInputs) -> Call:
    if inputs.deterministic:
        raise Unsupported("not offered: a fixed order of sums is asked of ours alone")
    _ = inputs.leaves  # which require gradients before the call is prepared
    return PROVIDERS[name].prepare(inputs)


def _by_autograd(inputs: GradientInputs, out: torch.Tensor, retain: bool) -> Gradients:
    return torch.autograd.grad(out, inputs.leaves, inputs.dout, retain_graph=retain)


GRADIENTS: dict[str, GradientProvider] = {OURS: GradientProvider(OURS, _forward, _backward)} | {
    name: GradientProvider(name, partial(_forward_of, name), _by_autograd)
    for name in ("fa4", "cudnn", "fa2", "flex", "flex_fa4")
}
