"""What every kernel's machine code must be."""

from __future__ import annotations

from typing import Any

from cutedsl_fa3.audit import audit
from cutedsl_fa3.compile import Compiled, compile_kernel


def assert_sound(plan: Any) -> Compiled:
    """Compile a plan's kernel: no spill, no advisory, and what its tables promise."""
    plan.check()
    compiled = compile_kernel(plan.kernel)
    resources = compiled.resources
    assert (resources.spill_stores, resources.spill_loads, resources.stack) == (0, 0, 0)
    assert resources.advisories == ()
    assert resources.smem_dynamic == plan.kernel.smem.total
    report = audit(plan.kernel, compiled)
    assert report.ok, report
    return compiled
