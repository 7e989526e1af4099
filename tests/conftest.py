"""Which tests run: those with a marker of `NEEDS` only where it is met; the others are counted."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from importlib.util import find_spec
from typing import TYPE_CHECKING

import pytest
import torch
from hypothesis import settings

if TYPE_CHECKING:
    from pretended import Gpu

settings.register_profile("default", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "default")


@pytest.fixture(autouse=True, scope="session")
def table_alone() -> Iterator[None]:
    """What was tuned on this machine decides no test."""
    from cutedsl_fa3 import tuned

    with tuned.set_aside():
        yield


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """A GPU that is not there, on which CPU tensors count as CUDA tensors up to the launch."""
    from pretended import pretended_gpu

    return pretended_gpu(monkeypatch)


def pytest_configure(config: pytest.Config) -> None:
    """Side by side, each worker has one core: threads of several would wait for one another."""
    if hasattr(config, "workerinput"):
        torch.set_num_threads(1)


_left_out = pytest.StashKey[dict[str, int]]()


def has_sm90() -> bool:
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def has_jupyter() -> bool:
    return all(find_spec(name) for name in ("nbclient", "ipykernel", "matplotlib"))


def has_attn_gym() -> bool:
    return find_spec("attn_gym") is not None


# By marker: whether it is met here, and what is said where it is not.
NEEDS: Mapping[str, tuple[Callable[[], bool], str]] = {
    "gpu": (has_sm90, "no CUDA device of capability 9.0 here"),
    "jupyter": (has_jupyter, "the extra `notebooks` is not installed here"),
    "attn_gym": (has_attn_gym, "the extra `gym` is not installed here"),
}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    counts = {}
    for marker, (met, _) in NEEDS.items():
        unmet = [item for item in items if item.get_closest_marker(marker)]
        if unmet and not met():
            config.hook.pytest_deselected(items=unmet)
            items[:] = [item for item in items if not item.get_closest_marker(marker)]
            counts[marker] = len(unmet)
    config.stash[_left_out] = counts


def pytest_sessionfinish(session: pytest.Session) -> None:
    # Under pytest-xdist the workers collect, and only the controller prints.
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["left_out"] = session.config.stash.get(_left_out, {})


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node, error) -> None:
    node.config.stash[_left_out] = getattr(node, "workeroutput", {}).get("left_out", {})


def pytest_terminal_summary(terminalreporter, config: pytest.Config) -> None:
    for marker, count in config.stash.get(_left_out, {}).items():
        terminalreporter.write_line(
            f"{count} {marker} tests left out: {NEEDS[marker][1]}", yellow=True
        )
