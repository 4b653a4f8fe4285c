"""The draft, its loss and every gradient against the definition in float64."""

import pytest
import torch
from draft_helpers import make_draft, named_weights, relative_error, run_step
from draft_reference import make_batch, make_config, reference_steps

PROMPT_ANSWER = [[False] * 4 + [True] * 5, [True] * 3, [False] * 6, [False, True, True, False, False, True, False]]
VARIANTS = {
    "plain": {},
    "residual_from_raw": {"norm_before_residual": False},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm_and_output": {"fc_norm": True, "norm_output": True},
    "qwen3": {"arch": "qwen3"},
    "two_layers": {"num_layers": 2},
    "three_layers_qwen3": {"num_layers": 3, "arch": "qwen3", "norm_output": True},
    "trained_head": {"train_head": True},
    "full_vocab": {"draft_vocab_size": 50, "train_head": True},
    "window": {"sliding_window": 3},
    "one_kv_head": {"num_kv_heads": 1},
    "no_groups": {"num_kv_heads": 4},
}


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_and_gradients_follow_the_definition(variant: str, dtype: torch.dtype, tolerance: float) -> None:
    config = make_config(**VARIANTS[variant])
    draft, target_head = make_draft(config, dtype)
    batch = make_batch(PROMPT_ANSWER, config, padding=3, dtype=dtype)
    num_steps, decay = 4, 0.8
    head, plan = run_step(draft, target_head, batch, num_steps, decay)
    head.loss.backward()

    weights = named_weights(draft, target_head)
    wanted = reference_steps(weights, config, batch, num_steps)
    step_loss = (wanted["kl"] * wanted["scored"]).sum(dim=1)
    loss = (step_loss * decay ** torch.arange(num_steps, dtype=torch.float64)).sum()
    loss.backward()

    assert plan.pairs_per_step == tuple(wanted["scored"].sum(dim=1).tolist())
    assert relative_error(head.loss, loss) < tolerance
    kl = torch.stack([part.sum() for part in head.kl.split(list(plan.pairs_per_step))])
    assert relative_error(kl, step_loss) < tolerance
    where = plan.rows.repeat(num_steps)[plan.pairs]
    step = torch.arange(num_steps).repeat_interleave(torch.tensor(plan.pairs_per_step))
    assert torch.equal(draft.draft_token_ids[head.best], wanted["best"][step, where])
    for name, p in draft.named_parameters():
        if p.requires_grad:
            assert p.grad is not None, name
            assert relative_error(p.grad, weights[name].grad) < tolerance, name


def test_bf16_stays_near_float32() -> None:
    config = make_config(hidden_size=64, intermediate_size=128)
    draft, target_head = make_draft(config, torch.float32)
    batch = make_batch(PROMPT_ANSWER, config, dtype=torch.bfloat16)
    exact, _ = run_step(draft, target_head, batch, 3)
    exact.loss.backward()
    gradients = {n: p.grad for n, p in draft.named_parameters() if p.grad is not None}
    draft.zero_grad(set_to_none=True)
    half, _ = run_step(draft, target_head, batch, 3, dtype=torch.bfloat16)
    half.loss.backward()
    assert abs(float(half.loss / exact.loss) - 1) < 0.02
    for name, p in draft.named_parameters():
        if p.requires_grad:
            assert p.grad.dtype == torch.float32
            assert relative_error(p.grad, gradients[name]) < 0.05, name


def test_loss_where_almost_everything_is_scored() -> None:
    """Then no states are picked out, and the few that are not scored weigh nothing."""
    config = make_config(train_head=True)
    draft, target_head = make_draft(config)
    batch = make_batch([[True] * 90, [True] * 70], config)
    head, plan = run_step(draft, target_head, batch, 2, 0.5)
    assert plan.num_pairs > 0.97 * 2 * plan.num_rows
    assert plan.num_pairs < 2 * plan.num_rows
    head.loss.backward()
    weights = named_weights(draft, target_head)
    wanted = reference_steps(weights, config, batch, 2)
    loss = ((wanted["kl"] * wanted["scored"]).sum(dim=1) * torch.tensor([1.0, 0.5])).sum()
    loss.backward()
    assert relative_error(head.loss, loss) < 1e-12
    assert relative_error(head.kl, wanted["kl"][wanted["scored"]]) < 1e-12
    for name, p in draft.named_parameters():
        if p.requires_grad:
            assert relative_error(p.grad, weights[name].grad) < 1e-10, name


def test_packed_equals_one_document_at_a_time() -> None:
    config = make_config(num_layers=2)
    draft, target_head = make_draft(config)
    batch = make_batch(PROMPT_ANSWER, config)
    head, _ = run_step(draft, target_head, batch, 3)
    head.loss.backward()
    packed = {n: p.grad.clone() for n, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad(set_to_none=True)
    total = torch.zeros((), dtype=torch.float64)
    for d in (0, 1, 3):  # document 2 is all prompt
        own = batch.doc == d
        alone = type(batch)(
            batch.ids[own],
            batch.features[own],
            batch.teacher[own],
            batch.mask[own],
            torch.zeros_like(batch.doc[own]),
            batch.pos[own],
            [d],
        )
        single, _ = run_step(draft, target_head, alone, 3)
        single.loss.backward()
        total += single.loss.detach()
    assert relative_error(head.loss, total) < 1e-12
    for name, gradient in packed.items():
        assert relative_error(gradient, draft.get_parameter(name).grad) < 1e-10, name


@pytest.mark.parametrize("field", ["ids", "features", "teacher"])
@pytest.mark.parametrize("kind", ["one_layer", "two_layers"])
def test_nothing_leaks_over_a_document_border(field: str, kind: str) -> None:
    """Change one document wholly: no other document's KL may move, in either direction."""
    config = make_config(num_layers=2 if kind == "two_layers" else 1)
    draft, target_head = make_draft(config)
    documents = [[False] * 2 + [True] * 4, [True] * 6, [False] * 3 + [True] * 5]
    batch = make_batch(documents, config)
    other = make_batch(documents, config, seed=1)
    changed = make_batch(documents, config)
    getattr(changed, field)[6:12] = getattr(other, field)[6:12]
    kl = []
    for b in (batch, changed):
        head, plan = run_step(draft, target_head, b, 4)
        kl.append(head.kl)
    owner = batch.doc[plan.rows.repeat(4)[plan.pairs]]
    assert torch.equal(kl[0][owner != 1], kl[1][owner != 1])
    assert not torch.equal(kl[0][owner == 1], kl[1][owner == 1])


def test_prompt_5_answer_3_supervises_slots_4_5_6() -> None:
    """x[5..7] is the answer; a slot is supervised if the token it embeds, x[t + 1], is of the answer."""
    from eagle3_lightning.draft.plan import plan_unroll

    config = make_config()
    tokens_in_answer = [False] * 5 + [True] * 3
    batch = make_batch([tokens_in_answer[1:]], config)
    plan = plan_unroll(batch, 3)
    assert plan.supervised.tolist() == [4, 5, 6]
    by_step = [plan.rows.repeat(3)[part].tolist() for part in plan.pairs.split(list(plan.pairs_per_step))]
    assert by_step == [[4, 5, 6], [3, 4, 5], [2, 3, 4]]
    assert plan.rows.tolist() == [2, 3, 4, 5, 6]

    draft, target_head = make_draft(config)
    head, _ = run_step(draft, target_head, batch, 1)
    wanted = reference_steps(named_weights(draft, target_head), config, batch, 1)
    assert wanted["scored"][0].nonzero().flatten().tolist() == [4, 5, 6]
    assert relative_error(head.kl, wanted["kl"][0, [4, 5, 6]]) < 1e-12


def test_long_documents_are_attended_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    from eagle3_lightning.draft import attention

    config = make_config()
    draft, target_head = make_draft(config)
    batch = make_batch([[False] * 3 + [True] * 20, [True] * 9], config)
    whole, _ = run_step(draft, target_head, batch, 3)
    monkeypatch.setattr(attention, "_CHUNK_ROWS", 4)
    chunked, _ = run_step(draft, target_head, batch, 3)
    assert relative_error(chunked.kl, whole.kl) < 1e-12
    whole.loss.backward()
    gradients = {n: p.grad.clone() for n, p in draft.named_parameters() if p.requires_grad}
    draft.zero_grad(set_to_none=True)
    chunked.loss.backward()
    for name, gradient in gradients.items():
        assert relative_error(draft.get_parameter(name).grad, gradient) < 1e-10, name
