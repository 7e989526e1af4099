"""Timelines: what each role of one CTA does when, predicted and measured, in one form.

    from cutedsl_fa3.timeline import predict, measure, draw

    predict(q, k, v, variant)       the traced kernel run against a clock; no GPU
    measure(q, k, v, variant)       a debug build that notes the clock, on an SM90 GPU
    draw(predicted, measured)       lanes side by side on one scale

table        `Timeline`: intervals of lanes; what both ways give
latencies    what the prediction takes for granted, each number with its origin
costs        clocks of a kernel's products and of what lies between them, from the cost ledger
timed        the events of a traced kernel's warps, each given a beginning and an end
predicted    tensors or a GEMM -> events -> `Timeline`
decode       the words of a debug build (pipelines/stamp.py) -> `Timeline`
measured     launches the debug build, reads its words; keeps records
drawing      one or more timelines as a figure
"""

from .drawing import draw
from .latencies import Latencies
from .measured import measure
from .predicted import predict, predict_gemm
from .table import Interval, Timeline

__all__ = ["Interval", "Latencies", "Timeline", "draw", "measure", "predict", "predict_gemm"]
