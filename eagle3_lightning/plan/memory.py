"""What lies where: the bytes of a run on each GPU and on the host.

`counted` items follow from shapes. `estimated` ones are rules of thumb for what vLLM and torch take beside them; the
formula of the trainer's activations is `activation_bytes`, held against measured peaks in tests/unit/test_plan.py.
"""

from dataclasses import dataclass

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.extract.engine import STAGES
from eagle3_lightning.options import LossOptions
from eagle3_lightning.plan.shape import TargetShape

GIB = 2**30
HEAD_CHUNK_ELEMENTS = 1 << 27  # draft/loss.py on CUDA; one chunk is still held while the next one is made
HEAD_CHUNK_CPU_ELEMENTS = 1 << 21
BEST_CHUNK_ELEMENTS = 1 << 26  # module.py: target logits at once where the teacher's best is looked for
CONTEXT_BYTES = 1.2 * GIB  # CUDA context, libraries and what the allocator cannot give back
GRAPHS_BYTES = 1.5 * GIB  # vLLM: context, NCCL, CUDA graphs


@dataclass(frozen=True)
class Item:
    """Something that takes memory.

    Attributes:
        name: what it is.
        num_bytes: how much it takes.
        estimated: by a rule of thumb, not counted.
        detail: how it comes about.
    """

    name: str
    num_bytes: float
    estimated: bool = False
    detail: str = ""


@dataclass(frozen=True)
class Precision:
    """Bytes of a value: of the masters, of what is computed, and of the target's frozen matrices."""

    master: int
    compute: int
    frozen: int


def trained_params(config: DraftConfig) -> int:
    """Values of the draft that the optimizer changes."""
    return trained_matrices(config) + trained_vectors(config)


def trained_matrices(config: DraftConfig) -> int:
    """Those of them in matrices."""
    h, (q, *_), qkv = config.hidden_size, config.qkv_sizes, sum(config.qkv_sizes)
    layer = h * qkv + q * h + 3 * h * config.intermediate_size
    first = h * qkv  # the first layer reads embeddings beside features
    head = h * config.draft_vocab_size if config.train_head else 0
    return config.num_aux * h * h + config.num_layers * layer + first + head


def trained_vectors(config: DraftConfig) -> int:
    """Those of them in norms."""
    h = config.hidden_size
    layer = 2 * h + (2 * config.head_dim if config.arch == "qwen3" else 0)
    before_fc = config.num_aux * h if config.norm_before_fc or config.fc_norm else 0
    return config.num_layers * layer + 2 * h + before_fc  # hidden_norm and norm


def export_params(config: DraftConfig) -> int:
    """Values of the exported tensors, vocabulary maps left out."""
    return trained_params(config) + (0 if config.train_head else config.hidden_size * config.draft_vocab_size)


def trainer_items(
    config: DraftConfig,
    loss: LossOptions,
    precision: Precision,
    optimizer: str,
    slots: int,
    ranks: int,
    *,
    on_cpu: bool = False,
) -> list[Item]:
    """What the trainer keeps on its device, and the peak of a step.

    Args:
        config: of the draft.
        loss: steps and recomputation.
        precision: bytes of a value.
        optimizer: `adamw` or `muon`.
        slots: of a micro-batch, all supervised (the largest case).
        ranks: of the trainer.
        on_cpu: the head goes by smaller chunks there, and there is no context.
    """
    params, size = trained_params(config), precision.master
    moments = 2 * params if optimizer == "adamw" else params + trained_vectors(config)  # Muon has AdamW for vectors
    head = config.draft_vocab_size * config.hidden_size * precision.frozen
    frozen = config.vocab_size * config.hidden_size * precision.frozen + head  # of the teacher, where ours is trained
    items = [
        Item(
            "draft: masters and gradients",
            2 * params * size,
            detail=f"{params / 1e6:,.1f} million values, 2 x {size} B",
        ),
        Item(f"draft: {optimizer}", moments * size),
        Item("draft: weights cast for a step", cast_bytes(config, precision)),
        Item("target's embeddings and lm_head rows, frozen", frozen),
        Item("batch: states of two", 2 * slots * (config.num_aux + 1) * config.hidden_size * precision.frozen),
        Item("step: activations", activation_bytes(config, loss, precision.compute, slots)),
        Item("step: teacher and logits", head_bytes(config, precision.compute, slots, on_cpu)),
    ]
    if not on_cpu:
        items.append(Item("context and allocator", CONTEXT_BYTES, estimated=True))
    if ranks > 1:
        items.insert(2, Item("draft: buckets of DDP", params * size, detail="gradients are summed over ranks in them"))
    return items


def cast_bytes(config: DraftConfig, precision: Precision) -> float:
    """Weights in the compute dtype. A matrix that needs neither cast nor stacking is used as it is."""
    if precision.compute != precision.master:
        return trained_params(config) * precision.compute
    h, stacked = config.hidden_size, sum(config.qkv_sizes) + 2 * config.intermediate_size
    scaled = config.num_aux * h * h if config.feature_scale or config.norm_before_fc or config.fc_norm else 0
    return (config.num_layers * h * stacked + h * sum(config.qkv_sizes) + scaled) * precision.compute


def activation_bytes(config: DraftConfig, loss: LossOptions, value_bytes: int, slots: int) -> float:
    """Activations at their peak, the end of the unroll: what the backward pass needs, and the states for the head.

    A layer keeps four [T, H] (input, its norm, the sum behind attention, its norm), attention's output, queries, keys
    and values, and both pre-activations of the MLP. A step keeps three [T, H] more, its states: as they came, in one
    tensor, and their gradient. Keys, values and states stay also where a step is recomputed.

    Args:
        config: of the draft.
        loss: steps and recomputation.
        value_bytes: of the compute dtype.
        slots: T, all supervised.
    """
    h, (q, *_), qkv = config.hidden_size, config.qkv_sizes, sum(config.qkv_sizes)
    layer = 4 * h + q + qkv + 2 * config.intermediate_size
    step = config.num_layers * layer + 3 * h
    kept = config.num_layers * qkv + (config.num_layers + 3) * h
    steps = loss.ttt_steps * step if not loss.checkpoint_steps else loss.ttt_steps * kept + step
    tokens = h + qkv  # normed embeddings and their projection
    fused = config.num_aux * h if config.norm_before_fc or config.fc_norm else 0
    statistics = loss.ttt_steps * config.num_layers * (config.num_heads + 2) * 4 * slots
    return (steps + tokens + fused) * value_bytes * slots + statistics


def head_bytes(config: DraftConfig, value_bytes: int, slots: int, on_cpu: bool = False) -> float:
    """Teacher's logits, two chunks of the draft's, and a logged step's chunk over the target's whole vocabulary."""
    pairs = min(HEAD_CHUNK_CPU_ELEMENTS if on_cpu else HEAD_CHUNK_ELEMENTS, slots * config.draft_vocab_size)
    best = BEST_CHUNK_ELEMENTS * (value_bytes + 4)
    return slots * config.draft_vocab_size * value_bytes + max(2 * pairs * value_bytes, best)


def engine_items(
    shape: TargetShape, tensor_parallel: int, batched_tokens: int, num_seqs: int, num_captured: int, value_bytes: int
) -> list[Item]:
    """What vLLM takes on each of its GPUs before the KV cache.

    Args:
        shape: of the target.
        tensor_parallel: GPUs that share it.
        batched_tokens: of one forward pass.
        num_seqs: requests at once.
        num_captured: layers whose states the tap takes.
        value_bytes: of the target's dtype.
    """
    info = shape.info
    width = 4 * info.hidden_size + 2 * (info.intermediate_size + info.num_heads * info.head_dim) / tensor_parallel
    logits = num_seqs * info.vocab_size * (4 + value_bytes)
    buffers = 1 + STAGES  # the graph's own, and the tap's
    states = buffers * batched_tokens * num_captured * info.hidden_size * value_bytes
    return [
        Item(
            f"weights{f', 1/{tensor_parallel} of them' if tensor_parallel > 1 else ''}",
            shape.gpu_bytes(tensor_parallel),
        ),
        Item("one forward pass: activations, logits", batched_tokens * width * value_bytes + logits, estimated=True),
        Item("captured states", states, estimated=True),
        Item("context, CUDA graphs", GRAPHS_BYTES, estimated=True),
    ]
