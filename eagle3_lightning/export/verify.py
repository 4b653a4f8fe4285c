"""Loads an export back and compares its logits with those of the draft it came from.

It catches what a round trip can get wrong: a tensor under another name or missing, a flag or size that config.json does
not carry, a feature scale that was folded twice or not at all. What remains is the rounding to the export's dtype.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float
from safetensors.torch import load_file
from torch import Tensor

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.draft.model import Eagle3Draft, Unroll
from eagle3_lightning.draft.plan import plan_unroll
from eagle3_lightning.export.read import CONFIG_FILE, WEIGHTS_FILE
from eagle3_lightning.export.schema import draft_config

NUM_SLOTS = 64
NUM_STEPS = 2  # the second step reads the first one's state, so the fed-back state is compared too
# Weights rounded to 8 bits of mantissa move the logits by under 1 % of their spread (0.4 to 0.8 % on SmolLM2's drafts).
MAX_ERROR = 0.03


@dataclass(frozen=True)
class LogitsCheck:
    """How near two drafts are.

    Attributes:
        relative_error: norm of the difference of the logits over the norm of the logits, mean over slots taken off.
        same_best: share of positions with the same best token.
    """

    relative_error: float
    same_best: float


def check_logits(draft: Eagle3Draft, export: Path) -> LogitsCheck:
    """Compare a draft with its export on random tokens and features.

    Args:
        draft: the draft in memory.
        export: the directory.

    Raises:
        AssertionError: the logits differ by more than rounding explains, or tensors are missing or unknown.
    """
    loaded = load_draft(export, draft.embed_tokens.weight)
    batch = _random_batch(draft)
    expected, found = _logits(draft, batch), _logits(loaded, batch)
    spread = expected - expected.mean(dim=-1, keepdim=True)
    difference = found - expected
    error = float((difference - difference.mean(dim=-1, keepdim=True)).norm() / spread.norm())
    same = float((expected.argmax(-1) == found.argmax(-1)).float().mean())
    assert error < MAX_ERROR, f"the export's logits are off by {error:.1%}: what was written is not what was trained"
    assert torch.equal(loaded.draft_token_ids.cpu(), draft.draft_token_ids.cpu()), (
        "the export's draft vocabulary is another one"
    )
    return LogitsCheck(error, same)


def load_draft(export: Path, embeddings: Float[Tensor, "V H"]) -> Eagle3Draft:
    """The draft of an exported directory.

    Args:
        export: the directory.
        embeddings: of the target, which an export does not hold; shared, not copied; the draft goes to their device.

    Raises:
        AssertionError: tensors are missing or unknown.
    """
    config = draft_config(json.loads((export / CONFIG_FILE).read_text(encoding="utf-8")))
    tensors = load_file(export / WEIGHTS_FILE)
    draft = Eagle3Draft(config, frozen_dtype=embeddings.dtype)
    missing, unknown = draft.load_state_dict(tensors, strict=False)
    allowed = {"feature_scale"} | ({"d2t", "t2d"} if config.full_vocab else set())
    assert not unknown, f"the export has unknown tensors {unknown}"
    assert set(missing) == allowed, f"the export lacks {set(missing) - allowed}"
    draft.embed_tokens.weight = embeddings
    return draft.to(embeddings.device)


def _random_batch(draft: Eagle3Draft) -> Eagle3Batch:
    """One document of random tokens with features of the size that the draft expects."""
    generator = torch.Generator().manual_seed(0)
    config = draft.config
    features = (
        torch.randn(NUM_SLOTS, config.num_aux, config.hidden_size, generator=generator)
        / draft.feature_scale.cpu().float()
    )
    return Eagle3Batch(
        ids=torch.randint(config.vocab_size, (NUM_SLOTS,), generator=generator),
        features=features,
        teacher=torch.zeros(NUM_SLOTS, config.hidden_size),
        mask=torch.ones(NUM_SLOTS, dtype=torch.bool),
        doc=torch.zeros(NUM_SLOTS, dtype=torch.int64),
        pos=torch.arange(NUM_SLOTS),
        sample_ids=[0],
    )


@torch.no_grad()
def _logits(draft: Eagle3Draft, batch: Eagle3Batch) -> Float[Tensor, "N D"]:
    """Logits of both steps in float32, one row after the other."""
    device = draft.embed_tokens.weight.device
    plan = plan_unroll(batch, NUM_STEPS).to(device)
    unroll = Unroll(draft, batch.to(device), plan, torch.float32, attention="sdpa")
    features = unroll.fuse()
    keys: list[list[Tensor]] = []
    values: list[list[Tensor]] = []
    logits = []
    for step in range(NUM_STEPS):
        states, features, key, value = unroll.step(step, features, keys, values)
        keys.append(key)
        values.append(value)
        logits.append(states @ unroll.head.matrix.t().float())
    return torch.cat(logits).cpu()
