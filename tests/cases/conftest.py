"""The devices that a case runs on."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """The emulator's device, and the kernel's where there is one."""
    return request.param
