"""What is held against fp64: a wrong output is noticed, whatever the softmax of its variant."""

from __future__ import annotations

import pytest
import torch

from cutedsl_fa3 import reference
from cutedsl_fa3.cases import VARIANTS, Case
from cutedsl_fa3.checks import WrongResult, check, samples
from cutedsl_fa3.peers import OURS, PROVIDERS, Inputs

SMALL = Case("causal", "bf16", 64, 64, 48, 80, 2, 4, 2)


def reference_call(inputs: Inputs):
    q, k, v = inputs.q, inputs.k, inputs.v
    return lambda: reference.attention(q, k, v, inputs.named.variant).to(q.dtype)


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_the_check_accepts_torch_at_the_input_dtype(variant: str, dtype: str) -> None:
    inputs = Case(variant, dtype, 64, 32, 48, 80, 2, 4, 2).inputs("cpu")
    check(inputs, reference_call(inputs))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("variant", VARIANTS)
def test_ours_is_right_for_every_variant_of_the_record(variant: str, device: str) -> None:
    name = variant.replace("1000", "100").replace("1024", "100")
    inputs = Case(name, "bf16", 128, 128, 500, 500, 1, 2, 2).inputs(device)
    assert check(inputs, PROVIDERS[OURS].prepare(inputs)) > 0


@pytest.mark.parametrize("variant", ["sigmoid", "sink", "documents:30", "bias"])
def test_the_check_notices_another_variant(variant: str) -> None:
    inputs = Case(variant, "bf16", 64, 64, 80, 80, 2, 4, 2).inputs("cpu")
    causal = Case("causal", "bf16", 64, 64, 80, 80, 2, 4, 2).inputs("cpu")
    with pytest.raises(WrongResult):
        check(inputs, reference_call(causal))


@pytest.mark.parametrize("spoil", ["nan", "shape", "one row", "scale"])
def test_the_check_notices_a_wrong_output(spoil: str) -> None:
    inputs = SMALL.inputs("cpu")
    right = reference_call(inputs)

    def call() -> torch.Tensor:
        out = right()
        if spoil == "nan":
            out[1, 7, 2, 5] = float("nan")
        elif spoil == "one row":
            out[:, -1] = out[:, -2]
        elif spoil == "scale":
            out *= 1.1
        return out[..., :-1] if spoil == "shape" else out

    with pytest.raises(WrongResult):
        check(inputs, call)


def test_the_check_tells_the_largest_error_in_its_rows() -> None:
    inputs = SMALL.inputs("cpu")
    right = reference_call(inputs)
    sampled = samples(inputs)
    at = sampled[0]
    nudge = 0.9 * at.allowed

    def call() -> torch.Tensor:
        out = right().double()
        out[at.batch, at.rows[3], at.head, 5] = at.exact[3, 5] + nudge
        return out

    assert check(inputs, call, sampled) == pytest.approx(nudge, rel=1e-6)
