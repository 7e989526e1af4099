"""A small model trained from scratch with a variant of its own: a learned bias within a window.

    data        tokens that repeat the one `lags[0]` or `lags[1]` places before, or are random
    Model       embedding, blocks of attention and MLP, head; no other knowledge of positions
    train       the same data from the same start, through one of three kinds of attention:
                OURS   attention(q, k, v, Variant(score, mask)), the bias a captured tensor
                DENSE  the same computation in torch, scores of all pairs in memory
                BLIND  OURS without the bias, which cannot tell one place from another
    gradients   of the first step, each beside DENSE in fp64

`python -m cutedsl_fa3 train` runs it on a GPU and writes a record; notebooks/20_training.ipynb runs
it small on the CPU and shows both.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from . import masks
from .interface import attention
from .peers import OURS
from .record import TrainRow
from .variant import Variant

DENSE, BLIND = "dense torch", "without the bias"
KINDS = (OURS, DENSE, BLIND)
REPEATS = (0.5, 0.3)  # how often a token is that of the first lag, and of the second
BIAS_RATE = 10.0  # a bias learns that many times faster than a weight
WARM_UP = 3  # steps that are not timed: kernels are loaded, the allocator grows


@dataclass(frozen=True)
class Sizes:
    """The task and the model; `window` keys are seen by a query, its own the last of them."""

    seqlen: int
    window: int
    lags: tuple[int, int]
    vocabulary: int
    heads: int
    head_dim: int
    layers: int
    batch: int
    steps: int
    rate: float

    @property
    def width(self) -> int:
        return self.heads * self.head_dim


SMALL = Sizes(128, 32, (3, 17), 16, 2, 32, 1, batch=4, steps=120, rate=5e-3)  # seconds on a CPU
LARGE = Sizes(4096, 256, (50, 200), 16, 4, 128, 2, batch=4, steps=300, rate=1e-3)


# The task


def data(sizes: Sizes, seed: int = 0) -> torch.Tensor:
    """The tokens of all steps, drawn on the CPU so that they are the same for every device.

    Shape: (steps, batch, seqlen + 1), int64.
    """
    random_numbers = torch.Generator().manual_seed(seed)
    shape = (sizes.seqlen + 1, sizes.steps * sizes.batch)  # a token of all sequences lies together
    tokens = torch.randint(sizes.vocabulary, shape, generator=random_numbers)
    drawn = torch.rand(shape, generator=random_numbers)
    near, far = sizes.lags
    for t in range(max(sizes.lags), sizes.seqlen + 1):
        repeated = torch.where(drawn[t] < sum(REPEATS), tokens[t - far], tokens[t])
        tokens[t] = torch.where(drawn[t] < REPEATS[0], tokens[t - near], repeated)
    return tokens.T.reshape(sizes.steps, sizes.batch, -1).contiguous()


def floor(tokens: torch.Tensor, sizes: Sizes) -> float:
    """The least loss on these tokens: of a model that knows the rule, and nothing that is random.

    Units: nats a token.
    """
    first = max(sizes.lags)
    token = tokens[..., first:]
    likely = torch.full(token.shape, (1 - sum(REPEATS)) / sizes.vocabulary)
    for lag, share in zip(sizes.lags, REPEATS, strict=True):
        likely += share * (tokens[..., first - lag : tokens.shape[-1] - lag] == token)
    return -likely.log().mean().item()


def loss_of(model: Model, tokens: torch.Tensor, sizes: Sizes) -> torch.Tensor:
    """Mean loss of the tokens whose two lags lie in the sequence.

    Shape: tokens (batch, seqlen + 1).
    """
    first = max(sizes.lags)
    logits = model(tokens[:, :-1])[:, first - 1 :]
    logits = logits if logits.dtype == torch.float64 else logits.float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, first:].flatten())


# The model


def dense(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """The same attention in plain torch: scores of all pairs, -inf outside the window.

    Shape: as for `attention`; table (heads, window).
    """
    scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(q.shape[3])
    weights = (scores + by_distance(table, q.shape[1])).softmax(-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights.to(v.dtype), v)


def by_distance(table: torch.Tensor, seqlen: int) -> torch.Tensor:
    """table[h, q - k] for each pair of positions, -inf where the table has no such distance.

    A view of one row for each head, since indexing by q - k adds up its gradient much slower.

    Shape: (heads, window) -> (heads, seqlen, seqlen).
    """
    around = (seqlen - table.shape[1], seqlen - 1)
    row = functional.pad(table.flip(1), around, value=-math.inf)  # by k - q + seqlen - 1
    return row.unfold(1, seqlen, 1).flip(1)


class Attention(nn.Module):
    """Attention whose scores have a learned bias for each head and distance, within a window."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        self.kind, self.heads = kind, (sizes.heads, sizes.head_dim)
        self.into = nn.Linear(sizes.width, 3 * sizes.width, bias=False)
        self.back = nn.Linear(sizes.width, sizes.width, bias=False)
        self.table = table = nn.Parameter(torch.zeros(sizes.heads, sizes.window))
        window = masks.window(sizes.window - 1, 0)
        self.biased = Variant(score=lambda s, b, h, q, k: s + table[h, q - k], mask=window)
        self.blind = Variant(mask=window)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.into(x).unflatten(-1, (3, *self.heads)).unbind(2)
        if self.kind == DENSE:
            o = dense(q, k, v, self.table)
        else:
            o = attention(q, k, v, self.biased if self.kind == OURS else self.blind)
        return self.back(o.flatten(2))


class Block(nn.Module):
    """Attention, then an MLP, each added to what it was given."""

    def __init__(self, sizes: Sizes, kind: str) -> None:
        super().__init__()
        width = sizes.width
        self.attention = nn.Sequential(nn.LayerNorm(width), Attention(sizes, kind))
        wide = nn.Linear(width, 4 * width)
        self.mlp = nn.Sequential(nn.LayerNorm(width), wide, nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(x)
        return x + self.mlp(x)


class Model(nn.Module):
    """Tokens to logits. Only the bias tells it how far apart two tokens are.

    Shape: (batch, seqlen) int64 -> (batch, seqlen, vocabulary).
    """

    def __init__(self, sizes: Sizes, kind: str, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):  # the same start for all, on the CPU
            torch.manual_seed(seed)
            self.embedding = nn.Embedding(sizes.vocabulary, sizes.width)
            self.blocks = nn.Sequential(*(Block(sizes, kind) for _ in range(sizes.layers)))
            self.head = nn.Sequential(
                nn.LayerNorm(sizes.width), nn.Linear(sizes.width, sizes.vocabulary)
            )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(tokens)))

    @property
    def tables(self) -> list[nn.Parameter]:
        """The bias of each layer, (heads, window)."""
        return [block.attention[1].table for block in self.blocks]


def optimizer(model: Model, sizes: Sizes) -> torch.optim.Optimizer:
    """AdamW without decay; the bias at a rate of its own."""
    weights = [p for name, p in model.named_parameters() if not name.endswith("table")]
    groups = [
        {"params": weights, "lr": sizes.rate},
        {"params": model.tables, "lr": BIAS_RATE * sizes.rate},
    ]
    return torch.optim.AdamW(groups, weight_decay=0.0)


# Training


@dataclass(frozen=True)
class Gradients:
    """Of one step by one kind of attention, beside DENSE in fp64: |difference| / |its|, in norm."""

    weights: float
    bias: float


def gradients(
    sizes: Sizes, tokens: torch.Tensor, kinds: tuple[str, ...] = (OURS, DENSE)
) -> dict[str, Gradients]:
    """The error of each kind's gradients in a step from the start, by kind.

    Shape: tokens (batch, seqlen + 1), on the device to compute on.
    """
    exact = _first_gradients(sizes, DENSE, tokens, double=True)
    found = {}
    for kind in kinds:
        its = _first_gradients(sizes, kind, tokens)
        found[kind] = Gradients(*(_apart(a, b) for a, b in zip(its, exact, strict=True)))
    return found


def _first_gradients(
    sizes: Sizes, kind: str, tokens: torch.Tensor, double: bool = False
) -> tuple[torch.Tensor, torch.Tensor]:
    """Those of all weights and of all tables, each as one fp64 vector."""
    model = Model(sizes, kind).to(tokens.device)
    if double:
        model = model.double()
    with autocast(tokens.device, enabled=not double):
        loss = loss_of(model, tokens, sizes)
    loss.backward()
    tables = {id(table) for table in model.tables}
    weights = [p.grad for p in model.parameters() if id(p) not in tables]
    return _vector(weights), _vector([table.grad for table in model.tables])


def _vector(parts: list[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([part.double().flatten() for part in parts if part is not None])


def _apart(a: torch.Tensor, exact: torch.Tensor) -> float:
    return ((a - exact).norm() / exact.norm()).item()


def autocast(device: torch.device, enabled: bool = True) -> torch.autocast:
    """Products in bf16, as mixed precision is trained; q, k and v reach `attention` in it."""
    return torch.autocast(device.type, torch.bfloat16, enabled=enabled)


@dataclass(frozen=True)
class Trained:
    """One run: its model, the loss of each step and how long it took."""

    kind: str
    model: Model
    losses: tuple[float, ...]
    samples: tuple[float, ...]  # milliseconds a step, those after WARM_UP
    peak_bytes: int  # of device memory; 0 on the CPU

    @property
    def ms(self) -> float:
        return statistics.median(self.samples)

    @property
    def bias(self) -> torch.Tensor:
        """Shape: (layers, heads, window), on the CPU."""
        return torch.stack([table.detach().float().cpu() for table in self.model.tables])


def train(
    kind: str, sizes: Sizes, tokens: torch.Tensor, device: str | torch.device = "cpu"
) -> Trained:
    """Train a model of this kind on all steps of `tokens`, from the same start as every other.

    Shape: tokens as from `data`.
    """
    device = torch.device(device)
    on_gpu = device.type == "cuda"
    model = Model(sizes, kind).to(device)
    steps = optimizer(model, sizes)
    if on_gpu:
        torch.cuda.reset_peak_memory_stats(device)
    losses, times = [], []
    for batch in tokens.to(device):
        start = time.perf_counter()
        with autocast(device):
            loss = loss_of(model, batch, sizes)
        steps.zero_grad(set_to_none=True)
        loss.backward()
        steps.step()
        losses.append(loss.item())  # which waits for the device
        if on_gpu:
            torch.cuda.synchronize(device)  # the optimizer's part too
        times.append(1e3 * (time.perf_counter() - start))
    peak = torch.cuda.max_memory_allocated(device) if on_gpu else 0
    return Trained(kind, model, tuple(losses), tuple(times[WARM_UP:] or times), peak)


def run(
    sizes: Sizes, device: str, report: Callable[[str], None], kinds: tuple[str, ...] = KINDS
) -> Iterator[TrainRow]:
    """Train each kind in turn: the rows of a record, with a line for each."""
    tokens = data(sizes)
    least = floor(tokens, sizes)
    errors = gradients(sizes, tokens[0, :1].to(device))
    for kind in kinds:
        trained = train(kind, sizes, tokens, device)
        peak = f", {trained.peak_bytes / 2**30:.2f} GiB" if trained.peak_bytes else ""
        report(
            f"{kind}: loss {trained.losses[0]:.3f} to {_last(trained.losses):.3f}, least "
            f"{least:.3f}; {trained.ms:.1f} ms a step{peak}"
        )
        yield row_of(trained, sizes, least, errors.get(kind))


def row_of(trained: Trained, sizes: Sizes, least: float, errors: Gradients | None) -> TrainRow:
    """A run as a record has it."""
    bias = () if trained.kind == BLIND else _rounded(trained.bias.tolist())
    return TrainRow(
        attention=trained.kind,
        dtype="bf16",
        seqlen=sizes.seqlen,
        window=sizes.window,
        lags=sizes.lags,
        heads=sizes.heads,
        head_dim=sizes.head_dim,
        layers=sizes.layers,
        batch=sizes.batch,
        floor=round(least, 5),
        losses=tuple(round(loss, 5) for loss in trained.losses),
        bias=bias,
        weight_error=errors and float(f"{errors.weights:.3g}"),
        bias_error=errors and float(f"{errors.bias:.3g}"),
        ms=round(trained.ms, 4),
        samples=tuple(round(sample, 4) for sample in trained.samples),
        peak_bytes=trained.peak_bytes,
    )


def _rounded(values: Any) -> Any:
    """Nested lists as tuples, to three digits after the point."""
    return tuple(map(_rounded, values)) if isinstance(values, list) else round(values, 3)


def _last(losses: tuple[float, ...], count: int = 10) -> float:
    return statistics.fmean(losses[-count:])
