"""Counted arithmetic of a training step: the one place that the plan, `perf/mfu` and docs/training.md count with.

Matrix products and attention only, backward included. A product of [n, a] with [a, b] counts 2·n·a·b. Causal attention
counts the (query, key) pairs that it sees: 4 FLOPs a pair and channel forward (scores, values), 2.5 times that backward
(the scores once more, and four products). What `checkpoint_steps` computes a second time is not counted.
"""

import itertools
from dataclasses import dataclass

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.plan import UnrollPlan

_ATTENTION = 3.5 * 4  # forward and backward, per pair and channel


@dataclass(frozen=True)
class Work:
    """The sizes of a micro-batch that its arithmetic depends on.

    Attributes:
        num_slots: T.
        num_rows: N, slots that are computed at every step.
        num_pairs: R, scored (step, row) pairs.
        num_supervised: slots scored at step 0.
        seen_by_rows: (query, key) pairs of causal attention with the rows as queries.
        seen_by_slots: the same with every slot as a query.
    """

    num_slots: float
    num_rows: float
    num_pairs: float
    num_supervised: float
    seen_by_rows: float
    seen_by_slots: float

    @classmethod
    def of_plan(cls, plan: UnrollPlan) -> "Work":
        """Of a batch whose plan is on the host or the device; only sizes that the host knows are read."""
        documents = plan.row_spans().documents
        sizes = [(d.row_end - d.row_start, d.slot_end - d.slot_start) for d in documents]
        bounds = plan.slot_bounds
        lengths = [b - a for a, b in itertools.pairwise(bounds)]
        return cls(
            num_slots=plan.num_slots,
            num_rows=plan.num_rows,
            num_pairs=plan.num_pairs,
            num_supervised=plan.num_supervised,
            seen_by_rows=sum(n * t - n * (n - 1) // 2 for n, t in sizes),
            seen_by_slots=sum(n * (n + 1) // 2 for n in lengths),
        )

    @classmethod
    def of_sample(cls, prompt_tokens: float, answer_tokens: float, ttt_steps: int) -> "Work":
        """Of one document: its answer is its end, and every slot that reads a token of the answer is supervised.

        Step k of a slot is scored if slot + k is supervised, so that K - 1 slots of the prompt are rows too.
        """
        slots = prompt_tokens + answer_tokens - 1
        rows = min(slots, answer_tokens + ttt_steps - 1)
        return cls(
            num_slots=slots,
            num_rows=rows,
            num_pairs=sum(max(0.0, min(answer_tokens, slots - k)) for k in range(ttt_steps)),
            num_supervised=answer_tokens,
            seen_by_rows=rows * slots - rows * (rows - 1) / 2,
            seen_by_slots=slots * (slots + 1) / 2,
        )


def flops_done(config: DraftConfig, ttt_steps: int, work: Work) -> float:
    """What our step executes: tokens projected once, and prompts through keys and values only.

    Args:
        config: of the draft.
        ttt_steps: K.
        work: sizes of the micro-batch.
    """
    k, t, n = ttt_steps, work.num_slots, work.num_rows
    h, (q, *_), qkv = config.hidden_size, config.qkv_sizes, sum(config.qkv_sizes)
    inner, more = q * h + 3 * h * config.intermediate_size, config.num_layers - 1
    shared = 2 * t * (config.num_aux * h * h + h * qkv)
    rows = 3 * (t + (k - 1) * n) * h * qkv + 3 * k * n * inner
    # Of several layers, all but the last compute every slot at step 0.
    rows += more * 3 * (t + (k - 1) * n) * (h * qkv + inner)
    head = h * config.draft_vocab_size
    heads = (2 + config.train_head) * work.num_pairs * head + work.num_supervised * head
    seen = k * work.seen_by_rows + more * (work.seen_by_slots + (k - 1) * work.seen_by_rows)
    return 2.0 * (shared + rows + heads) + _ATTENTION * q * seen


def flops_defined(config: DraftConfig, ttt_steps: int, work: Work) -> float:
    """The arithmetic as the definition reads: every step on every slot, nothing shared between steps.

    Args:
        config: of the draft.
        ttt_steps: K.
        work: sizes of the micro-batch.
    """
    k, t = ttt_steps, work.num_slots
    h, (q, *_), qkv = config.hidden_size, config.qkv_sizes, sum(config.qkv_sizes)
    layers = config.num_layers * (h * qkv + q * h + 3 * h * config.intermediate_size) + h * qkv
    head = h * config.draft_vocab_size
    products = 3 * k * layers + 2 * config.num_aux * h * h + (2 + config.train_head) * k * head + head
    return 2.0 * t * products + k * _ATTENTION * config.num_layers * q * work.seen_by_slots
