"""The attention kernels that the benchmark times side by side, each through its public call.

A provider prepares a call for given inputs (imports, compilation's objects and block masks stay
out of the timed region) or says why it cannot: ImportError when it is not installed, `Unsupported`
when it does not offer the variant. Inputs are (batch, seqlen, heads, head_dim), outputs the same.

| provider      | comes from                               | variants                            |
|---------------|------------------------------------------|-------------------------------------|
| `cutedsl_fa3` | this project                             | all                                 |
| `fa3`         | fa3-fwd: FlashAttention-3, C++           | full, causal, softcap; bf16         |
| `fa4`         | flash-attn-4: FlashAttention-4, CuTe DSL | full, causal, softcap, window, sink |
| `cudnn`       | torch SDPA on cuDNN                      | full, causal                        |
| `fa2`         | torch SDPA on its FlashAttention-2       | full, causal                        |
| `flex`        | torch.compile(flex_attention), Triton    | all but sigmoid and sink            |
| `flex_fa4`    | the same on FlashAttention-4's kernel    | all but sigmoid and sink            |

What a provider is asked for and cannot do with a head size is its own error, and is reported.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from types import FunctionType
from typing import Any

import torch

from .errors import Unsupported
from .named import Named

Call = Callable[[], Any]  # the output, or of a backward the gradients


@dataclass(frozen=True)
class Inputs:
    """One problem's tensors and its variant.

    Shape: q (batch, seqlen_q, heads, head_dim); k and v (batch, seqlen_k, kv_heads, head_dim).
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    named: Named

    @property
    def grouped(self) -> bool:
        """Whether several query heads share a key head."""
        return self.q.shape[2] != self.k.shape[2]

    def heads_first(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """q, k, v as (batch, heads, seqlen, head_dim) views."""
        return self.q.transpose(1, 2), self.k.transpose(1, 2), self.v.transpose(1, 2)


@dataclass(frozen=True)
class Provider:
    """A kernel's name in records, the distribution it comes from and what prepares a call."""

    name: str
    distribution: str
    prepare: Callable[[Inputs], Call]

    @property
    def version(self) -> str | None:
        """The installed version, or None."""
        try:
            return version(self.distribution)
        except PackageNotFoundError:
            return None


def _need(ok: bool, what: str) -> None:
    if not ok:
        raise Unsupported(f"not offered: {what}")


def _options_only(inputs: Inputs) -> Named:
    """The variant, for kernels that take options instead of functions."""
    named = inputs.named
    _need(not named.only_functions, f"{named.name!r}, a variant given by functions")
    return named


def _ours(inputs: Inputs) -> Call:
    from .interface import attention

    q, k, v, variant = inputs.q, inputs.k, inputs.v, inputs.named.variant
    return lambda: attention(q, k, v, variant)


def _fa3(inputs: Inputs) -> Call:
    from fa3_fwd_interface import flash_attn_func

    named = _options_only(inputs)
    _need(inputs.q.dtype == torch.bfloat16, f"{inputs.q.dtype} (this build has bf16)")
    _need(named.window is None, "local windows (left out of this build)")
    _need(named.sink is None, "sinks")
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: flash_attn_func(q, k, v, causal=named.causal, softcap=named.softcap)


def _fa4(inputs: Inputs) -> Call:
    from flash_attn.cute import flash_attn_func

    named = _options_only(inputs)
    options = {
        "causal": named.causal and named.window is None,
        "window_size": named.window or (None, None),
        "softcap": named.softcap,
        "learnable_sink": named.sink,
    }
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: _first(flash_attn_func(q, k, v, **options))


def _first(result: torch.Tensor | tuple) -> torch.Tensor:
    """The output of a call that may return the LSE beside it."""
    return result[0] if isinstance(result, tuple) else result


def _sdpa(backend_name: str) -> Callable[[Inputs], Call]:
    def prepare(inputs: Inputs) -> Call:
        from torch.nn.attention import SDPBackend, sdpa_kernel

        named = _options_only(inputs)
        plain = named.window is None and not named.softcap and named.sink is None
        _need(plain, f"{named.name!r}")
        square = inputs.q.shape[1] == inputs.k.shape[1]
        _need(square or not named.causal, "bottom-right causal masks (its alignment is top-left)")
        q, k, v = inputs.heads_first()
        backend, grouped = getattr(SDPBackend, backend_name), inputs.grouped

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                out = torch.nn.functional.scaled_dot_product_attention(
                    q, k, v, is_causal=named.causal, enable_gqa=grouped
                )
            return out.transpose(1, 2)

        return call

    return prepare


def _scores_and_masks(inputs: Inputs) -> Named:
    """The variant, for kernels whose softmax is fixed."""
    named = inputs.named
    softmax = named.weight is None and named.sink is None
    _need(softmax, f"{named.name!r}, another softmax (flex takes scores and masks)")
    return named


def _flex(inputs: Inputs, options: dict[str, str] | None = None) -> Call:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    named, grouped = _scores_and_masks(inputs), inputs.grouped

    def attend(q, k, v, score, blocks):
        return flex_attention(q, k, v, score, blocks, enable_gqa=grouped, kernel_options=options)

    # torch keeps compiled code by code object, and past a limit of recompilations it would run a
    # problem uncompiled: each problem gets a code object of its own, and compiles once.
    own = FunctionType(attend.__code__.replace(), attend.__globals__, closure=attend.__closure__)
    compiled = torch.compile(own, dynamic=False, fullgraph=True)
    q, k, v = inputs.heads_first()
    blocks = None
    if named.mask is not None:
        blocks = create_block_mask(
            named.mask, None, None, q.shape[2], k.shape[2], device=q.device.type
        )
    return lambda: compiled(q, k, v, named.score, blocks).transpose(1, 2)


def _flex_fa4(inputs: Inputs) -> Call:
    _scores_and_masks(inputs)
    import flash_attn.cute  # noqa: F401  # it is not installed: said here, and not by the compiler

    return _flex(inputs, {"BACKEND": "FLASH"})


OURS = "cutedsl_fa3"
PROVIDERS: dict[str, Provider] = {
    provider.name: provider
    for provider in (
        Provider(OURS, "cutedsl-fa3", _ours),
        Provider("fa3", "fa3-fwd", _fa3),
        Provider("fa4", "flash-attn-4", _fa4),
        Provider("cudnn", "torch", _sdpa("CUDNN_ATTENTION")),
        Provider("fa2", "torch", _sdpa("FLASH_ATTENTION")),
        Provider("flex", "torch", _flex),
        Provider("flex_fa4", "torch", _flex_fa4),
    )
}


def versions() -> dict[str, str]:
    """The peers that are installed here, by name."""
    peers = [provider for provider in PROVIDERS.values() if provider.name != OURS]
    return {peer.name: peer.version for peer in peers if peer.version}
