"""python .scratch_bwd.py            all cases, each in its own process with a timeout, then timings
   python .scratch_bwd.py one NAME   one case here
   python .scratch_bwd.py tile NAME  intermediate comparisons of a case
   python .scratch_bwd.py time       timings only"""
import math, subprocess, sys, time
import torch
import cutedsl_fa3 as fa3
from cutedsl_fa3 import masks
from cutedsl_fa3.variant import Variant
from cutedsl_fa3.calls_backward import backward

# name: (dtype, d, batch, sq, sk, heads, kv_heads, mask, kind of strides)
C = {
    "tiny128": ("bf16", 128, 1, 64, 128, 1, 1, None, ""),
    "two_m128": ("bf16", 128, 1, 128, 128, 1, 1, None, ""),
    "two_n128": ("bf16", 128, 1, 64, 256, 1, 1, None, ""),
    "tails128": ("bf16", 128, 2, 77, 201, 2, 2, None, ""),
    "causal128": ("bf16", 128, 2, 512, 512, 2, 2, "causal", ""),
    "causal_tails128": ("bf16", 128, 2, 333, 517, 2, 2, "causal", ""),
    "gqa128": ("bf16", 128, 2, 300, 400, 8, 2, "causal", ""),
    "window128": ("bf16", 128, 1, 1000, 1000, 2, 2, "window", ""),
    "strided128": ("bf16", 128, 2, 200, 200, 2, 2, "causal", "strided"),
    "sum128": ("bf16", 128, 2, 200, 200, 2, 2, "causal", "ones"),
    "fp16_128": ("fp16", 128, 2, 256, 256, 2, 2, None, ""),
    "long128": ("bf16", 128, 2, 2048, 2048, 4, 4, "causal", ""),
    "tiny64": ("bf16", 64, 1, 128, 128, 1, 1, None, ""),
    "two_m64": ("bf16", 64, 1, 256, 128, 1, 1, None, ""),
    "two_n64": ("bf16", 64, 1, 128, 256, 1, 1, None, ""),
    "tails64": ("bf16", 64, 2, 77, 201, 2, 2, None, ""),
    "causal64": ("bf16", 64, 2, 512, 512, 2, 2, "causal", ""),
    "causal_tails64": ("bf16", 64, 2, 333, 517, 2, 2, "causal", ""),
    "gqa64": ("bf16", 64, 2, 300, 400, 8, 2, "causal", ""),
    "long64": ("bf16", 64, 2, 2048, 2048, 4, 4, "causal", ""),
    "d40": ("bf16", 40, 2, 100, 130, 2, 2, None, ""),
    "d104": ("bf16", 104, 2, 100, 130, 2, 2, None, ""),
    "dlse128": ("bf16", 128, 2, 100, 130, 2, 2, None, "dlse"),
    "documents128": ("bf16", 128, 1, 1024, 1024, 2, 2, "documents", ""),
    "direct128": ("bf16", 128, 2, 333, 517, 2, 2, "causal", "direct"),
    "direct64": ("bf16", 64, 2, 333, 517, 2, 2, "causal", "direct"),
    "m64_d64": ("bf16", 64, 2, 333, 517, 2, 2, "causal", "m64"),
    "alibi128": ("bf16", 128, 2, 300, 400, 4, 2, "alibi", ""),
    "softcap128": ("bf16", 128, 2, 300, 300, 2, 2, "softcap", ""),
    "sigmoid128": ("bf16", 128, 2, 300, 300, 2, 2, "sigmoid", ""),
    "bias128": ("bf16", 128, 1, 130, 140, 2, 2, "bias", ""),
    "alibi64": ("bf16", 64, 2, 300, 400, 4, 2, "alibi", ""),
    "softcap64": ("bf16", 64, 2, 300, 300, 2, 2, "softcap", ""),
    "sigmoid64": ("bf16", 64, 2, 300, 300, 2, 2, "sigmoid", ""),
    "nothing128": ("bf16", 128, 1, 400, 400, 2, 2, "nothing", ""),
}
DT = {"bf16": torch.bfloat16, "fp16": torch.float16}


SCORES = {}
def variant(name, sq, sk):
    torch.manual_seed(1)
    if name == "alibi":
        t = torch.rand(16, device="cuda")
        SCORES["f"] = lambda s, b, h, q, k: s + t[h] * (k - q)
        return Variant(score=SCORES["f"], mask=masks.causal)
    if name == "softcap":
        SCORES["f"] = lambda s, b, h, q, k: 5.0 * torch.tanh(s / 5.0)
        return Variant(score=SCORES["f"], mask=masks.causal)
    if name == "bias":
        t = torch.randn(2, 256, 256, device="cuda")
        SCORES["f"] = lambda s, b, h, q, k: s * 0.5 + t[h, q, k]
        return Variant(score=SCORES["f"])
    if name == "sigmoid":
        SCORES["w"] = lambda s: torch.sigmoid(s - 2.0)
        return Variant(mask=masks.causal, softmax=fa3.Elementwise(SCORES["w"]))
    if name is None:
        return Variant()
    if name == "causal":
        return Variant(mask=masks.causal)
    if name == "window":
        return Variant(mask=lambda b, h, q, k: (k <= q) & (q - k < 200))
    if name == "documents":
        doc = (torch.arange(max(sq, sk), device="cuda") // 150).int()
        return Variant(mask=lambda b, h, q, k: (doc[q] == doc[k]) & (k <= q))
    if name == "nothing":  # queries below 150 see nothing, keys from 300 are seen by nobody
        return Variant(mask=lambda b, h, q, k: (q >= 150) & (k < 300) & (k <= q))


def dense(v, sq, sk):
    if v.mask is None:
        return torch.ones(sq, sk, dtype=torch.bool, device="cuda")
    from cutedsl_fa3.variant.evaluate import evaluate
    q = torch.arange(sq, device="cuda")[:, None]; k = torch.arange(sk, device="cuda")
    at = {"b": 0, "h": 0, "q": q, "k": k, "seqlen_q": sq, "seqlen_k": sk}
    return evaluate(v.mask, at, v.captures).expand(sq, sk)


def reference(q, k, v, do, seen, scale, dtype, dlse=None):
    q, k, v = (t.detach().to(dtype).requires_grad_() for t in (q, k, v))
    g = q.shape[2] // k.shape[2]
    kk, vv = (t.repeat_interleave(g, 2) for t in (k, v))
    s = torch.einsum("bqhd,bkhd->bhqk", q, kk) * scale
    if "f" in SCORES:
        ix = [torch.arange(n, device="cuda").view(*[-1 if i == j else 1 for j in range(4)]) for i, n in enumerate(s.shape)]
        s = SCORES["f"](s, *ix).to(dtype)
    if "w" in SCORES:
        p = SCORES["w"](s).masked_fill(~seen, 0.0)
        o = torch.einsum("bhqk,bkhd->bqhd", p, vv)
        return torch.autograd.grad((o * do.to(dtype)).sum(), (q, k, v))
    s = s.masked_fill(~seen, -math.inf)
    none = ~seen.any(-1)
    p = torch.softmax(s, -1).masked_fill(none[:, None], 0.0) if dtype == torch.float64 else \
        torch.softmax(s.float(), -1).to(dtype).masked_fill(none[:, None], 0.0)
    o = torch.einsum("bhqk,bkhd->bqhd", p, vv)
    loss = (o * do.to(dtype)).sum()
    if dlse is not None:
        loss = loss + (torch.logsumexp(s.float() if dtype != torch.float64 else s, -1) * dlse.to(torch.float32 if dtype != torch.float64 else dtype)).sum()
    return torch.autograd.grad(loss, (q, k, v))


def make(name):
    dt, d, b, sq, sk, h, hk, mask, kind = C[name]
    torch.manual_seed(0)
    n = lambda s, h: torch.randn(b, s, h, d, device="cuda").to(DT[dt])
    q, k, v, do = n(sq, h), n(sk, hk), n(sk, hk), n(sq, h)
    if kind == "strided":
        w = torch.randn(b, h, sq, 3, d, device="cuda").to(DT[dt])
        q, k, v = (w[:, :, :, i].transpose(1, 2) for i in range(3))
        do = do.transpose(1, 2).contiguous().transpose(1, 2)
    if kind == "ones":
        do = torch.ones((), device="cuda", dtype=DT[dt]).expand(b, sq, h, d)
    dlse = torch.randn(b, h, sq, device="cuda") if kind == "dlse" else None
    return q, k, v, do, variant(mask, sq, sk), d ** -0.5, dlse


def sched(var, d, **kw):
    import dataclasses
    from cutedsl_fa3.kernels.sm90.backward.schedule import default_schedule
    from cutedsl_fa3.problem import Problem
    return dataclasses.replace(default_schedule(var, Problem("bf16", d, d)), **kw)


def one(name):
    q, k, v, do, var, scale, dlse = make(name)
    global backward
    kw = {"direct": dict(add="direct"), "m64": dict(tile_m=64, parts=1)}.get(C[name][8])
    if kw:
        plain = backward
        backward = lambda *a, **b: plain(*a, **b, schedule=sched(var, q.shape[3], **kw))
    out, lse = fa3.attention_with_lse(q, k, v, var) if var.has_lse else (fa3.attention(q, k, v, var), None)
    start = time.time()
    got = backward(q, k, v, out, lse, do, var, scale, dlse=dlse)
    torch.cuda.synchronize()
    took = time.time() - start
    again = backward(q, k, v, out, lse, do, var, scale, dlse=dlse)
    torch.cuda.synchronize()
    seen = dense(var, q.shape[1], k.shape[1])
    want = reference(q, k, v, do, seen, scale, torch.float64, dlse)
    low = reference(q, k, v, do, seen, scale, q.dtype, dlse)
    text, ok = [], True
    for what, a, w, l, g2 in zip(("dq", "dk", "dv"), got, want, low, again):
        err, torchs = (a.double() - w).abs().max().item(), (l.double() - w).abs().max().item()
        good = err <= 2 * torchs + 1e-3 and math.isfinite(err)
        ok &= good
        same = torch.equal(a, g2)
        text.append(f"{what} {err:.2e}/{torchs:.2e}{'' if good else ' BAD'}{'' if same else ' differs again'}")
        if not good:
            bad = ((a.double() - w).abs() > 2 * torchs + 1e-3)
            at = bad.nonzero()
            text.append(f"[{what}: {bad.float().mean().item():.3f} wrong; rows {sorted(set((at[:,1]//8*8).tolist()))[:40]} cols {sorted(set((at[:,3]//8*8).tolist()))[:40]} ratio {((a.double()*w).sum()/(w*w).sum()).item():.3f} nan {a.isnan().sum().item()} zero {(a==0).float().mean().item():.3f}]")
    if name.startswith("nothing"):
        zero = [got[0][:, :150].abs().max().item(), got[1][:, 300:].abs().max().item(), got[2][:, 300:].abs().max().item()]
        text.append(f"zeros {zero}")
        ok &= zero == [0, 0, 0]
    print(f"{'ok  ' if ok else 'FAIL'} {name:16} {took:5.1f} s  " + "  ".join(text), flush=True)


def tile(name):
    """Which operand is wrong: gradients when one side is made simple."""
    q, k, v, do, var, scale, _ = make(name)
    for what in ("dO=1", "K=e0", "Q=e0", "V=0"):
        a = [t.clone() for t in (q, k, v, do)]
        if what == "dO=1":
            a[3].fill_(1.0)
        if what in ("K=e0", "Q=e0"):
            t = a[what == "K=e0"]; t.zero_(); t[..., 0] = 1.0
        if what == "V=0":
            a[2].zero_()
        out, lse = fa3.attention_with_lse(*a[:3], var)
        got = backward(*a[:3], out, lse, a[3], var, scale)
        torch.cuda.synchronize()
        want = reference(*a, dense(var, q.shape[1], k.shape[1]), scale, torch.float64)
        for n, g, w in zip(("dq", "dk", "dv"), got, want):
            e = (g.double() - w)
            print(f"  {name} {what} {n}: max err {e.abs().max().item():.3e} of {w.abs().max().item():.3e}")
            if n == "dq" or e.abs().max() > 0.05 * w.abs().max() + 1e-3:
                torch.set_printoptions(precision=3, sci_mode=False, linewidth=200)
                print("   got  rows 0,1,8,16,32 cols 0-7", g[0, [0, 1, 8, 16, 32], 0, :8].float().tolist())
                print("   want", w[0, [0, 1, 8, 16, 32], 0, :8].float().tolist())


def window(run, ms=8.0):
    """Median time of a run among several back to back, without what the host costs."""
    for _ in range(3): run()
    torch.cuda.synchronize()
    a, e = torch.cuda.Event(True), torch.cuda.Event(True)
    a.record(); run(); run(); e.record(); e.synchronize()
    n = max(3, int(ms / max(a.elapsed_time(e) / 2, 1e-3)))
    ts = []
    for _ in range(5):
        time.sleep(0.03)
        a.record()
        for _ in range(n): run()
        e.record(); e.synchronize(); ts.append(a.elapsed_time(e) / n)
    return sorted(ts)[2]


def timing():
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention as sdpa
    try:
        from flash_attn.cute.interface import _flash_attn_bwd as fa4
        print("FA4 found")
    except Exception as error:
        fa4 = None
    for d in (64, 128):
        for causal in (False, True):
            s, h = 4096, 2048 // d
            b = 16384 // s
            n = lambda: torch.randn(b, s, h, d, device="cuda").to(torch.bfloat16)
            q, k, v, do = n(), n(), n(), n()
            var = Variant(mask=masks.causal) if causal else Variant()
            out, lse = fa3.attention_with_lse(q, k, v, var)
            flop = 2.5 * 4 * b * h * s * s * d / (2 if causal else 1)
            qq, kk, vv = (x.transpose(1, 2).detach().requires_grad_() for x in (q, k, v))
            with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
                o = sdpa(qq, kk, vv, is_causal=causal)
                g = do.transpose(1, 2)
                peer = window(lambda: torch.autograd.grad(o, (qq, kk, vv), g, retain_graph=True))
            row = {"cuDNN": peer}
            if fa4 is not None:
                try:
                    row["FA4"] = window(lambda: fa4(q, k, v, out, do, lse, causal=causal))
                except Exception as error:
                    print("  FA4:", str(error)[:200])
            labels = {"tma": dict(add="tma"), "direct": dict(add="direct"), "direct places 1": dict(places=1, add="direct"), "direct stages 3": dict(stages=3, add="direct"), "head_group 4": dict(head_group=4), "head_group 16": dict(head_group=16)}
            if d == 64:
                labels |= {"m64": dict(tile_m=64, parts=1, add="direct"), "m128 1 part": dict(parts=1)}
            for label, kw in labels.items():
                try:
                    sc = sched(var, d, **kw)
                    row[label] = window(lambda: backward(q, k, v, out, lse, do, var, schedule=sc))
                except Exception as error:
                    print("  ", label, str(error)[:300])
            print(f"d{d} {'causal' if causal else 'full'} S={s}: " + "; ".join(f"{l} {x:.3f} ms {flop / x / 1e9:.0f}" for l, x in row.items()), flush=True)
    if "profile" in sys.argv:
        from torch.profiler import ProfilerActivity, profile
        with profile(activities=[ProfilerActivity.CUDA]) as prof:
            backward(q, k, v, out, lse, do, var); torch.cuda.synchronize()
        print(prof.key_averages().table(sort_by="cuda_time_total", row_limit=5)[:2500])


def main():
    for name in C:
        try:
            r = subprocess.run([sys.executable, __file__, "one", name], timeout=60, capture_output=True, text=True)
            lines = [l for l in r.stdout.splitlines() if l.strip()]
            print("\n".join(lines) or f"FAIL {name}: rc {r.returncode} {r.stderr[-800:]}", flush=True)
            if "FAIL" in r.stdout and name in ("tiny128", "tiny64", "two_m128", "two_m64"):
                r = subprocess.run([sys.executable, __file__, "tile", name], timeout=60, capture_output=True, text=True)
                print(r.stdout or r.stderr[-800:], flush=True)
        except subprocess.TimeoutExpired:
            print(f"FAIL {name}: HANGS", flush=True)
    try:
        r = subprocess.run([sys.executable, __file__, "time", "profile"], timeout=400, capture_output=True, text=True)
        print(r.stdout, r.stderr[-1500:], flush=True)
    except subprocess.TimeoutExpired:
        print("timing HANGS")


if __name__ == "__main__":
    if len(sys.argv) > 2 and sys.argv[1] == "one":
        one(sys.argv[2])
    elif len(sys.argv) > 2 and sys.argv[1] == "tile":
        tile(sys.argv[2])
    elif len(sys.argv) > 1 and sys.argv[1] == "time":
        timing()
    else:
        main()
