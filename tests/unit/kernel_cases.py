"""The Triton kernels against the plain torch that the CPU path uses; collected by test_draft_kernels.py alone."""

from types import ModuleType

import pytest
import torch

from eagle3_lightning.draft import attention, ops
from eagle3_lightning.draft.loss import Teacher, _chunk_kl, teach
from eagle3_lightning.draft.rope import Rope


@pytest.fixture(scope="module")
def kernels() -> ModuleType:
    from eagle3_lightning.draft import kernels

    return kernels


@pytest.fixture(scope="module")
def flash() -> ModuleType:
    from eagle3_lightning.draft import flash

    return flash


@pytest.fixture(scope="module")
def kl_kernels() -> ModuleType:
    from eagle3_lightning.draft import kl

    return kl


@pytest.fixture(scope="module")
def same_slot() -> ModuleType:
    from eagle3_lightning.draft import same_slot

    return same_slot


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def close(got: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("with_y", [False, True])
def test_norm(kernels: ModuleType, with_y: bool) -> None:
    x, y, w = (
        normal(5, 24).requires_grad_(),
        normal(5, 24, seed=1).requires_grad_(),
        normal(24, seed=2).requires_grad_(),
    )
    total, normed = ops.add_rms_norm(x, y, w, 1e-5) if with_y else (x, ops.rms_norm(x, w, 1e-5))
    got = kernels.norm_forward(x.detach(), y.detach() if with_y else None, w.detach(), 1e-5)
    close(got[0], total.detach())
    close(got[1], normed.detach())
    dtotal, dnormed = normal(5, 24, seed=3), normal(5, 24, seed=4)
    ((total * dtotal).sum() + (normed * dnormed).sum()).backward()
    dx, dw = kernels.norm_backward(got[0], got[2], w.detach(), dtotal, dnormed)
    close(dx, x.grad)
    close(dw, w.grad)
    close(kernels.norm_forward(x.detach(), None, None, 1e-5)[1], ops.unweighted_norm(x.detach(), 1e-5))


def test_swiglu(kernels: ModuleType) -> None:
    gate_up, dproduct = normal(3, 2 * 20).requires_grad_(), normal(3, 20, seed=1)
    gate, up = gate_up.chunk(2, dim=-1)
    product = torch.nn.functional.silu(gate) * up
    (product * dproduct).sum().backward()
    close(kernels.swiglu_forward(gate_up.detach()), product.detach())
    again, dgate_up = kernels.swiglu_backward(gate_up.detach(), dproduct.clone())
    close(again, product.detach())
    close(dgate_up, gate_up.grad)


@pytest.mark.parametrize("partial", [1.0, 0.5])
@pytest.mark.parametrize("indexed", [None, False, True])
def test_rope_and_added_rows(kernels: ModuleType, partial: float, indexed: bool | None) -> None:
    heads, d, n, t = (4, 2, 2), 12, 5, 7
    rope = Rope({"rope_theta": 100.0, "partial_rotary_factor": partial}, d, 64)
    cos, sin = (table[torch.tensor([0, 3, 1, 9, 4])] for table in rope.tables(16, torch.zeros(1)))
    x = normal(n, sum(heads) * d).requires_grad_()
    rows = t if indexed else n
    table = normal(rows, sum(heads) * d, seed=1).requires_grad_()
    shifted, unshifted = torch.tensor([1, 2, 3, 4, 6]), torch.tensor([5, 0, 1, 2, 3, 5, 4])
    added = None if indexed is None else ops.Added(table, shifted if indexed else None, unshifted if indexed else None)
    parts = ops.rope_heads(x, cos, sin, rope.rotary_dim, heads, added)
    got = kernels.rope_forward(
        x.detach(),
        None if added is None else table.detach(),
        added.shifted if added else None,
        cos,
        sin,
        rope.rotary_dim,
        6,
    )
    for mine, wanted in zip(got.split(heads, dim=1), parts, strict=True):
        close(mine, wanted.detach())
    grads = [normal(*p.shape, seed=2 + i) for i, p in enumerate(parts)]
    sum((p * g).sum() for p, g in zip(parts, grads, strict=True)).backward()
    dx = kernels.rope_backward(*grads, cos, sin, rope.rotary_dim)
    close(dx[:n], x.grad)
    assert not dx[n].any()
    if added is not None:
        close(dx[unshifted] if indexed else dx[:n], table.grad)


@pytest.mark.parametrize(("q_heads", "kv_heads"), [(6, 2), (4, 4)])
@pytest.mark.parametrize("num_keys", [1, 3])
def test_merge(same_slot: ModuleType, q_heads: int, kv_heads: int, num_keys: int) -> None:
    n, d, scale = 4, 12, 0.3
    fused_qkv = normal(n, q_heads + 2 * kv_heads, d)  # queries are a strided view, as rope_forward leaves them
    q, out, lse = fused_qkv[:, :q_heads], normal(n, q_heads, d, seed=1), normal(q_heads, n, seed=2)
    pairs = [
        normal(n, q_heads + 2 * kv_heads, d, seed=3 + i).split((q_heads, kv_heads, kv_heads), dim=1)
        for i in range(num_keys)
    ]
    keys, values = [p[1] for p in pairs], [p[2] for p in pairs]
    wanted = attention._merge(scale, q, out, lse, keys, values)
    got = same_slot.merge_forward(scale, q, out.clone(), lse.clone(), keys, values)
    close(got[0], wanted[0])
    close(got[1], wanted[1])
    dout, dq = normal(n, q_heads, d, seed=9), normal(n, q_heads, d, seed=10)
    terms = normal(q_heads, n, seed=11)
    wanted_b = attention._merge_backward(scale, q, wanted[1], terms, dout, dq, keys, values)
    got_b = same_slot.merge_backward(scale, q, wanted[1], terms, dout, dq.clone(), keys, values)
    close(got_b[0], wanted_b[0])
    for mine, theirs in zip([*got_b[1], *got_b[2]], [*wanted_b[1], *wanted_b[2]], strict=True):
        close(mine, theirs)


def test_columns(kernels: ModuleType) -> None:
    wide, factor, out = normal(5, 40), normal(24, seed=1), torch.zeros(5, 40)
    kernels.scale_columns(wide[:, :24], factor, out[:, 8:32])
    close(out[:, 8:32], wide[:, :24] * factor)
    assert not out[:, :8].any()
    assert not out[:, 32:].any()
    kernels.scale_columns(wide[:, 24:], None, out[:, :16])
    close(out[:, :16], wide[:, 24:])
    weight, gradient = normal(70, 40, seed=2)[:, :24], normal(70, 40, seed=3)[:, 16:]
    dnorm = (weight * gradient).sum(dim=0)
    scaled = gradient * factor
    close(kernels.folded_norm_backward(weight, gradient, factor), dnorm)
    close(gradient, scaled)


def test_kl(kl_kernels: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kl_kernels, "_VOCAB_BLOCK", 16)
    last, head = normal(4, 8), normal(37, 8, seed=1)
    teacher = teach(last, head)
    lse, negentropy = kl_kernels.teacher_statistics(teacher.logits)
    close(lse, teacher.lse)
    close(negentropy, teacher.negentropy)
    logits, rows, weight = normal(6, 37, seed=2) * 3, torch.tensor([0, 3, 1, 1, 2, 0]), normal(6, seed=3).abs()
    kl, gradient = _chunk_kl(logits.clone(), Teacher(teacher.logits, lse, negentropy), rows, weight, True)
    mine = logits.clone()
    close(kl_kernels.kl_rows(mine, teacher.logits, lse, negentropy, rows, weight, True), kl)
    close(mine, gradient)


def test_adamw() -> None:
    from eagle3_lightning.draft.adamw import CudaAdamW

    def run(kind: type[torch.optim.AdamW], skipped: bool) -> list[torch.Tensor]:
        params = [torch.nn.Parameter(normal(70, 40)), torch.nn.Parameter(normal(3, seed=1))]
        optimizer = kind(
            [{"params": params[:1], "weight_decay": 0.1}, {"params": params[1:], "weight_decay": 0.0}],
            lr=1e-2,
            betas=(0.9, 0.95),
            fused=True,
        )
        for i in range(4):
            for p in params:
                p.grad = normal(*p.shape, seed=2 + i)
            optimizer.grad_scale, optimizer.found_inf = torch.tensor(4.0), torch.tensor(float(skipped and i == 2))
            optimizer.step()
            optimizer.param_groups[0]["lr"] *= 0.5
        states = [optimizer.state[p] for p in params]
        return [*(p.detach() for p in params), *(s[name] for s in states for name in ("step", "exp_avg", "exp_avg_sq"))]

    for skipped in (False, True):
        for mine, theirs in zip(run(CudaAdamW, skipped), run(torch.optim.AdamW, skipped), strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize(("q_heads", "kv_heads", "d"), [(4, 2, 16), (2, 2, 24)])
def test_flash(
    flash: ModuleType,
    same_slot: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    window: int | None,
    q_heads: int,
    kv_heads: int,
    d: int,
) -> None:
    from draft_reference import make_batch, make_config

    from eagle3_lightning.draft.plan import plan_unroll

    for name in ("_tiles_forward", "_tiles_keys", "_tiles_queries"):
        monkeypatch.setattr(flash, name, lambda q: flash.Tiles(16, 16, 1, 1))
    documents = [[False] * 9 + [True] * 25, [True] * 18, [False] * 20, [True], [False] * 30 + [True] * 3]
    spans = plan_unroll(make_batch(documents, make_config()), 2).row_spans()
    num_rows, num_slots = int(spans.starts_q[-1]), int(spans.starts_k[-1])
    q = normal(num_rows, q_heads + 1, d)[:, :q_heads]  # rows further apart than they are wide
    k, v = normal(num_slots, kv_heads, d, seed=1), normal(num_slots, kv_heads, d, seed=2)
    dense = attention.DenseBackend(spans, 0.3, window)
    wanted = dense.forward(q, k, v)
    got = flash.flash_forward(q, k, v, spans, 0.3, window or 0)
    close(got[0], wanted[0])
    close(got[1], wanted[1])
    dout = normal(num_rows, q_heads, d, seed=3)
    lse, out = wanted[1] + 0.7, wanted[0] * 0.5  # of a softmax over more than these keys
    terms = same_slot.row_terms(dout, out)
    close(terms, (dout * out).sum(-1).t())
    for mine, theirs in zip(
        flash.flash_backward(dout, q, k, v, lse, terms, spans, 0.3, window or 0),
        dense.backward(dout, q, k, v, lse, terms),
        strict=True,
    ):
        close(mine, theirs)
