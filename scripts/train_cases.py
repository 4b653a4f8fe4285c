"""Cases of bench_train.py: shapes, packings, and how many matrix FLOPs a step of each takes."""

from dataclasses import dataclass
from typing import Any

import torch

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.plan import UnrollPlan, plan_unroll
from eagle3_lightning.plan.flops import Work, flops_defined, flops_done

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_heads": 32,
    "num_kv_heads": 8,
    "vocab_size": 128256,
}
KIMI_K25: dict[str, Any] = {
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "num_heads": 64,
    "num_kv_heads": 64,
    "vocab_size": 163840,
}


@dataclass(frozen=True)
class Case:
    """One line of the table.

    Attributes:
        name: of the line.
        shape: sizes of the draft.
        tokens: packed tokens of a batch.
        ttt_steps: K.
        documents: length of each document; `random` is 100 to 4,000, another packing at every step.
        train_head: whether the lm_head is trained.
        answer_share: share of each document, at its end, that is supervised.
        checkpoint_steps: recompute each step in the backward pass.
        num_steps: steps that are timed.
    """

    name: str
    shape: dict[str, Any]
    tokens: int = 8192
    ttt_steps: int = 3
    documents: int | str = 2048
    train_head: bool = False
    answer_share: float = 1.0
    checkpoint_steps: bool = False
    num_steps: int = 20

    def config(self) -> DraftConfig:
        """The draft of the case."""
        return DraftConfig(
            arch="llama",
            num_layers=1,
            head_dim=128,
            draft_vocab_size=32000,
            num_aux=3,
            rms_norm_eps=1e-5,
            rope={"rope_type": "default", "rope_theta": 500000.0},
            max_position_embeddings=131072,
            train_head=self.train_head,
            **self.shape,
        )

    def lengths(self, seed: int) -> list[int]:
        """Document lengths of a packing."""
        if isinstance(self.documents, int):
            return [self.documents] * (self.tokens // self.documents)
        generator, lengths = torch.Generator().manual_seed(seed), []
        while (left := self.tokens - sum(lengths)) > 0:
            lengths.append(min(left, int(torch.randint(100, 4001, (1,), generator=generator))))
        return lengths


CASES = [
    Case("8B, TTT 3", LLAMA_8B),
    Case("8B, TTT 3, random documents", LLAMA_8B, documents="random"),
    Case("8B, TTT 3, half of each document is prompt", LLAMA_8B, answer_share=0.5),
    Case("8B, TTT 3, trained head", LLAMA_8B, train_head=True),
    Case("8B, TTT 3, one document of 32,768", LLAMA_8B, tokens=32768, documents=32768, num_steps=5),
    Case("Kimi-K2.5 size, TTT 7, 8,192 tokens", KIMI_K25, ttt_steps=7, num_steps=5),
    Case("Kimi-K2.5 size, TTT 7, 32,768 tokens", KIMI_K25, ttt_steps=7, tokens=32768, num_steps=3),
    Case("8B, TTT 7", LLAMA_8B, ttt_steps=7),  # last: speculators compiles longest for it
]
# speculators' processes; cases of one share a compiled graph. Its step has no form for the other lines.
PEER_PROCESSES = [
    ["8B, TTT 3", "8B, TTT 3, random documents", "8B, TTT 3, half of each document is prompt"],
    ["8B, TTT 3, trained head"],
    ["8B, TTT 7"],
]


# ---- batches and counts ----------------------------------------------------------------------------------------------


def make_batches(case: Case, device: str) -> list[Eagle3Batch]:
    """Batches that share their random tensors and differ in ids and, where they are random, in documents."""
    c, torch_device = case.config(), torch.device(device)
    features = torch.randn(case.tokens, c.num_aux, c.hidden_size, dtype=torch.bfloat16, device=device)
    teacher = torch.randn(case.tokens, c.hidden_size, dtype=torch.bfloat16, device=device)
    batches = []
    for seed in range(case.num_steps if case.documents == "random" else 3):
        lengths = case.lengths(seed)
        doc = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        pos = torch.cat([torch.arange(n) for n in lengths])
        mask = torch.cat([torch.arange(n) >= n * (1 - case.answer_share) for n in lengths])
        ids = torch.randint(0, c.vocab_size, (case.tokens,), generator=torch.Generator().manual_seed(seed))
        none = torch.empty(0)
        host = Eagle3Batch(ids, none, none, mask, doc, pos, list(range(len(lengths))))
        plan = plan_unroll(host, case.ttt_steps)
        moved = host.to(device)
        batches.append(
            Eagle3Batch(
                moved.ids, features, teacher, moved.mask, moved.doc, moved.pos, host.sample_ids, plan.to(torch_device)
            )
        )
    return batches


def flops_by_definition(case: Case, plan: UnrollPlan) -> float:
    """Matrix FLOPs of a step as the definition reads: every step on every slot, backward included, nothing shared."""
    return flops_defined(case.config(), case.ttt_steps, Work.of_plan(plan))


def flops_executed(case: Case, plan: UnrollPlan) -> float:
    """Matrix FLOPs that our step really does: tokens projected once, rows and scored pairs only."""
    return flops_done(case.config(), case.ttt_steps, Work.of_plan(plan))


def same_model(a: Case, b: Case) -> bool:
    """Whether two cases differ in their batches only."""
    return (a.shape, a.ttt_steps, a.train_head, a.tokens, a.checkpoint_steps) == (
        b.shape,
        b.ttt_steps,
        b.train_head,
        b.tokens,
        b.checkpoint_steps,
    )
