"""Attention kernels composed from readable CuTe DSL pieces.

    import cutedsl_fa3 as fa3
    variant = fa3.Variant(score=..., mask=...)
    out = fa3.attention(q, k, v, variant)
    print(fa3.plan(q, k, v, variant))

Names load on first use, so that importing the package needs neither the compiler nor a GPU.
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

# In a checkout, layouts/ and pipelines/ lie beside this package; a wheel holds them inside it.
_checkout = Path(__file__).resolve().parent.parent
if (_checkout / "layouts" / "__init__.py").is_file():
    __path__.append(str(_checkout))

if TYPE_CHECKING:
    from . import gallery, masks, packing, reference, scores, tuned
    from .errors import LayoutError, Unsupported, VariantError
    from .hang import Hang
    from .hang_attention import watched
    from .interface import attention, attention_with_lse, plan, visits
    from .layouts import explain
    from .model import check_pipeline
    from .pipelines import Schedule, ScheduleError
    from .plans import Plan
    from .problem import Problem
    from .shadow import ShadowMismatch, shadow_check
    from .tuning import tune
    from .variant import Elementwise, OnlineSoftmax, Variant, seqlen_k, seqlen_q

_HOME = {
    "Elementwise": "variant",
    "Hang": "hang",
    "LayoutError": "errors",
    "OnlineSoftmax": "variant",
    "Unsupported": "errors",
    "VariantError": "errors",
    "attention": "interface",
    "attention_with_lse": "interface",
    "check_pipeline": "model",
    "explain": "layouts",
    "plan": "interface",
    "Schedule": "pipelines",
    "ScheduleError": "pipelines",
    "Plan": "plans",
    "Problem": "problem",
    "ShadowMismatch": "shadow",
    "Variant": "variant",
    "seqlen_k": "variant",
    "seqlen_q": "variant",
    "shadow_check": "shadow",
    "tune": "tuning",
    "visits": "interface",
    "watched": "hang_attention",
}
_NEEDS_COMPILER = (
    "hang",
    "hang_attention",
    "interface",
    "layouts",
    "model",
    "pipelines",
    "plans",
    "tuned",
    "tuning",
)
_MODULES = ("gallery", "masks", "packing", "reference", "scores", "tuned")

__all__ = [
    "Elementwise",
    "Hang",
    "LayoutError",
    "OnlineSoftmax",
    "Plan",
    "Problem",
    "Schedule",
    "ScheduleError",
    "ShadowMismatch",
    "Unsupported",
    "Variant",
    "VariantError",
    "attention",
    "attention_with_lse",
    "check_pipeline",
    "explain",
    "gallery",
    "masks",
    "packing",
    "plan",
    "reference",
    "scores",
    "seqlen_k",
    "seqlen_q",
    "shadow_check",
    "tune",
    "tuned",
    "visits",
    "watched",
]


def __getattr__(name: str) -> object:
    home = name if name in _MODULES else _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if home in _NEEDS_COMPILER:  # else the first missing import would say less
        import_module(".versions", __name__).require_dsl()
    module = import_module(f".{home}", __name__)
    if name in _MODULES:
        return module
    value = getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
