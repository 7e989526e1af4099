"""Causal attention with ALiBi, two Python functions, taken as far as this machine goes."""

from __future__ import annotations

import statistics
from dataclasses import replace

import torch

from . import cache
from .audit import audit
from .bench import BURST, Case, NoDevice, check, require_gpu, take_turns
from .interface import plan
from .peers import OURS, PROVIDERS, Call, Inputs

CASE = Case(
    variant="alibi",
    dtype="bf16",
    head_dim=128,
    head_dim_v=128,
    seqlen_q=4096,
    seqlen_k=4096,
    batch=4,
    heads=16,
    kv_heads=16,
)


def main() -> bool:
    """Plan, compile and audit; on an SM90 GPU also run, verify and time. False on a difference."""
    small = CASE.inputs("cpu")
    planned = plan(small.q, small.k, small.v, small.named.variant)
    _title("The plan, before anything is compiled")
    print(planned)

    compiled = cache.get(planned.kernel)
    _title(f"The machine code: {len(compiled.cubin)} bytes of cubin for {compiled.arch}")
    report = audit(planned.kernel, compiled)
    print(report)

    try:
        require_gpu()
    except NoDevice as reason:
        _title("Not run here")
        print(f"{reason}.")
        print(
            f"An H100 or H200 would now run {CASE}, hold the result against fp64, and time it "
            "beside torch's SDPA: plain causal, and with ALiBi as a bias tensor."
        )
        return report.ok
    _run()
    return report.ok


def _run() -> None:
    """Verify and time on the GPU.

    Raises: WrongResult.
    """
    inputs = CASE.inputs("cuda")
    ours = PROVIDERS[OURS].prepare(inputs)
    check(inputs, ours)
    _title(f"Right on {torch.cuda.get_device_name()}")
    print(f"{CASE}: sampled rows agree with fp64 as closely as torch's own {CASE.dtype} allows")

    plain = replace(CASE, variant="causal").inputs("cuda")
    calls = {
        "this kernel, causal ALiBi": ours,
        "torch SDPA, ALiBi as a bias tensor": _sdpa_with_bias(inputs),
        "torch SDPA, causal without ALiBi": PROVIDERS["fa2"].prepare(plain),
    }
    _title("Milliseconds a call, median of bursts in random order")
    for name, samples in take_turns(calls, BURST).items():
        ms = statistics.median(samples)
        print(f"{ms:8.3f} ms  {CASE.flops / ms / 1e9:5.0f} TFLOP/s  {name}")


def _sdpa_with_bias(inputs: Inputs) -> Call:
    """The same variant as torch's SDPA takes it: as a dense tensor of heads x queries x keys."""
    q, k, v = inputs.heads_first()
    heads, seqlen_q, seqlen_k = q.shape[1], q.shape[2], k.shape[2]
    h, i, j = (torch.arange(n, device=q.device) for n in (heads, seqlen_q, seqlen_k))
    score, mask = inputs.named.score, inputs.named.mask
    assert score and mask
    bias = q.new_empty(1, heads, seqlen_q, seqlen_k)
    for head in h:  # head by head: the fp32 values of all heads would be twice the bias
        values = score(q.new_zeros(()).float(), 0, head, i[:, None], j)
        bias[0, head] = values.masked_fill(~mask(0, head, i[:, None], j), float("-inf"))
    attention = torch.nn.functional.scaled_dot_product_attention
    return lambda: attention(q, k, v, attn_mask=bias).transpose(1, 2)


def _title(text: str) -> None:
    print(f"\n{text}\n{'-' * len(text)}")
