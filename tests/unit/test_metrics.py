"""Accuracies and the walk on cases made by hand, and against a walk written as a loop."""

import pytest
import torch
from draft_helpers import make_draft, named_weights, run_step
from draft_reference import make_batch, make_config, reference_steps, reference_walk
from torch import Tensor

from eagle3_lightning.draft.metrics import DraftMetrics, Scores, scores, walk


def rows(*lines: str) -> Tensor:
    """Booleans from strings of 1 and 0."""
    return torch.tensor([[c == "1" for c in line] for line in lines])


def measure(right: Tensor, scored: Tensor, doc: Tensor) -> dict[str, float]:
    metric = DraftMetrics(len(right))
    pairs, supervised = int(scored.sum()), int(scored[0].sum())
    metric.update(
        Scores(
            torch.ones(pairs),
            right & scored,
            scored,
            doc,
            torch.ones(supervised, dtype=torch.bool),
            torch.ones(0, dtype=torch.bool),
        )
    )
    return {name: float(value) for name, value in metric.compute().items()}


def chained(mask: str, num_steps: int) -> Tensor:
    """Which steps of which slots are scored in one document with this mask."""
    values = [c == "1" for c in mask]
    return torch.tensor([[t + k < len(values) and values[t + k] for t in range(len(values))] for k in range(num_steps)])


def test_walk_jumps_over_what_was_accepted() -> None:
    # Slots 0..6 are supervised. From 0 two steps are right: on to 3. From 3 none: on to 4. From 4 one: on to 6, then 7.
    accepted, supervised = torch.tensor([2, 0, 0, 0, 1, 1, 0]), torch.ones(7, dtype=torch.bool)
    assert walk(accepted, supervised, torch.zeros(7, dtype=torch.long)).nonzero().flatten().tolist() == [0, 3, 4, 6]


def test_walk_starts_at_the_answer_and_skips_the_next_question() -> None:
    accepted = torch.tensor([3, 3, 1, 0, 0, 3, 3, 0, 1])
    supervised = torch.tensor([0, 0, 1, 1, 1, 0, 0, 1, 1]).bool()
    # 2 -> 4 -> 5, which is not supervised -> 7 -> 8
    assert walk(accepted, supervised, torch.zeros(9, dtype=torch.long)).nonzero().flatten().tolist() == [2, 4, 7, 8]


def test_walk_does_not_enter_the_next_document() -> None:
    accepted = torch.tensor([1, 1, 1, 0, 0])
    doc = torch.tensor([0, 0, 0, 1, 1])
    assert walk(accepted, torch.ones(5, dtype=torch.bool), doc).nonzero().flatten().tolist() == [0, 2, 3, 4]
    unsupervised = torch.tensor([1, 1, 1, 0, 0]).bool()
    assert walk(accepted, unsupervised, doc).nonzero().flatten().tolist() == [0, 2]
    late = torch.tensor([0, 0, 0, 0, 1]).bool()
    assert walk(accepted, late, doc).nonzero().flatten().tolist() == [4]


def test_tau_counts_the_bonus_token() -> None:
    """Slot 0 has two right steps, slot 3 none, slot 4 one: 3 + 1 + 2 tokens in 3 rounds."""
    scored = chained("111111", 2)
    right = rows("110011", "101100")
    assert measure(right, scored, torch.zeros(6, dtype=torch.long))["tau"] == pytest.approx(6 / 3)


def test_tau_of_an_always_right_and_of_a_never_right_draft() -> None:
    doc, scored = torch.zeros(8, dtype=torch.long), chained("1" * 8, 3)
    assert measure(torch.ones(3, 8, dtype=torch.bool), scored, doc)["tau"] == 4.0
    assert measure(torch.zeros(3, 8, dtype=torch.bool), scored, doc)["tau"] == 1.0


def test_accuracies_by_hand() -> None:
    scored = chained("01111", 2)
    assert scored.tolist() == rows("01111", "11110").tolist()
    right = rows("11101", "11010")  # slot 0 is not supervised at step 0 and counts nowhere
    named = measure(right, scored, torch.zeros(5, dtype=torch.long))
    assert named["full_acc_1"] == pytest.approx(3 / 4)  # slots 1, 2, 4 of 1, 2, 3, 4
    assert named["full_acc_2"] == pytest.approx(1 / 3)  # slot 1 of 1, 2, 3
    assert named["cond_acc_2"] == pytest.approx(1 / 2)  # slot 1 of 1, 2
    assert named["loss"] == pytest.approx(8 / 4)
    assert named["loss_2"] == 1.0


def test_every_metric_follows_the_definition() -> None:
    config = make_config(draft_vocab_size=40)
    draft, target_head = make_draft(config)
    batch = make_batch(
        [[False] * 3 + [True] * 9, [True] * 14, [False] * 2, [True, False, False, True, True, True]], config
    )
    batch.teacher *= 3
    num_steps = 3
    head, plan = run_step(draft, target_head, batch, num_steps)
    full_teacher = (batch.teacher @ target_head.t()).argmax(-1)
    teacher_best = full_teacher[plan.supervised]
    # An untrained draft is almost never right, so most of its answers are put right where it can say the word.
    draft_index = torch.cumsum(draft.t2d, 0) - 1
    answer = teacher_best[plan.teacher_of_pair]
    put_right = (torch.rand(plan.num_pairs, generator=torch.Generator().manual_seed(1)) < 0.8) & draft.t2d[answer]
    head.best.copy_(torch.where(put_right, draft_index[answer], head.best))
    metric = DraftMetrics(num_steps, decay=0.5)
    metric.update(
        scores(plan, head.kl, head.best, teacher_best, draft.draft_token_ids, draft.t2d, batch.ids, batch.doc)
    )
    got = metric.compute()

    wanted = reference_steps(named_weights(draft, target_head), config, batch, num_steps)
    step = torch.arange(num_steps).repeat_interleave(torch.tensor(plan.pairs_per_step))
    wanted["best"][step[put_right], plan.rows.repeat(num_steps)[plan.pairs][put_right]] = answer[put_right]
    doc, scored, num_slots = batch.doc, wanted["scored"], len(batch.ids)
    right = torch.tensor(
        [
            [bool(scored[k, t]) and bool(wanted["best"][k, t] == full_teacher[t + k]) for t in range(num_slots)]
            for k in range(num_steps)
        ]
    )
    assert right.any()
    assert not right.all()
    for k in range(num_steps):
        starts = [t for t in range(num_slots) if all(scored[j, t] for j in range(k + 1))]
        so_far = [t for t in starts if all(right[j, t] for j in range(k))]
        found = [t for t in so_far if right[k, t]]
        assert float(got[f"full_acc_{k + 1}"]) == pytest.approx(len(found) / len(starts))
        assert float(got[f"cond_acc_{k + 1}"]) == pytest.approx(len(found) / len(so_far))
        assert float(got[f"loss_{k + 1}"]) == pytest.approx(float(wanted["kl"][k][scored[k]].mean().detach()))
    supervised = scored[0].nonzero().flatten().tolist()
    in_vocab = set(draft.draft_token_ids.tolist())
    assert float(got["teacher_oov"]) == pytest.approx(
        sum(int(full_teacher[t]) not in in_vocab for t in supervised) / len(supervised)
    )
    followed = [t for t in supervised if t + 1 < num_slots and doc[t + 1] == doc[t]]
    assert float(got["greedy_agreement"]) == pytest.approx(
        sum(int(batch.ids[t + 1] == full_teacher[t]) for t in followed) / len(followed)
    )
    loss = sum(0.5**k * float((wanted["kl"][k] * scored[k]).sum().detach()) for k in range(num_steps)) / len(supervised)
    assert float(got["loss"]) == pytest.approx(loss)
    advanced, rounds = reference_walk(right, scored, doc)
    assert float(got["tau"]) == pytest.approx(advanced / rounds)


def test_walk_agrees_with_a_loop_on_random_packs() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        lengths = torch.randint(1, 30, (5,), generator=generator).tolist()
        doc = torch.cat([torch.full((n,), i) for i, n in enumerate(lengths)])
        masks = ["".join(map(str, (torch.rand(n, generator=generator) < 0.7).int().tolist())) for n in lengths]
        scored = torch.cat([chained(m, 4) for m in masks], dim=1)
        right = (torch.rand(scored.shape, generator=generator) < 0.6) & scored
        if not scored[0].any():
            continue
        advanced, rounds = reference_walk(right, scored, doc)
        assert measure(right, scored, doc)["tau"] == pytest.approx(advanced / rounds)


def test_sums_add_up_over_batches() -> None:
    """Means of means would differ: the second batch is larger."""
    metric = DraftMetrics(1)
    for length, good in ((2, 2), (6, 0)):
        scored = torch.ones(1, length, dtype=torch.bool)
        right = (torch.arange(length) < good)[None]
        metric.update(
            Scores(
                torch.ones(length),
                right,
                scored,
                torch.zeros(length, dtype=torch.long),
                torch.ones(length, dtype=torch.bool),
                torch.zeros(0, dtype=torch.bool),
            )
        )
    assert float(metric.compute()["full_acc_1"]) == pytest.approx(2 / 8)


def test_the_names_are_those_of_the_figures() -> None:
    metric = DraftMetrics(2)
    assert metric.names == list(metric.compute())
