"""Every option of a run, as frozen dataclasses; the command line, the YAML files and the checkpoints share them.

Senseless numbers and cross-field mistakes are ConfigErrors raised in `__post_init__`, so that they cost nobody a vLLM
start.
"""

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eagle3_lightning.checks import (
    COUNT,
    NOT_NEGATIVE,
    POSITIVE,
    POSITIVE_SHARE,
    SHARE,
    SHARE_BELOW_ONE,
    Range,
    check_numbers,
    refuse_null,
)
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.layers import Convention


@dataclass(frozen=True)
class TargetOptions:
    """The model to be made faster, as vLLM serves it.

    Attributes:
        path: a checkpoint directory with safetensors, or a hub id.
        layers: auxiliary layer ids (three), optionally with the last layer as a fourth; None takes vLLM's default.
        layer_convention: what the numbers in `layers` mean: `output` (0-based layer outputs) or `vllm` (layers run).
        name: how an export names the target to `vllm serve`; None writes `path`.
        trust_remote_code: let Transformers and vLLM run code that the checkpoint brings.
    """

    path: str
    layers: list[int] | None = None
    layer_convention: Convention = "output"
    name: str | None = None
    trust_remote_code: bool = False

    def __post_init__(self) -> None:
        """Refuse a path that is null or empty."""
        refuse_null("target", self)
        if not self.path.strip():
            raise ConfigError("target.path", self.path, "it is empty", "Name a checkpoint directory or a hub id.")


@dataclass(frozen=True)
class DraftOptions:
    """Shape of the draft. Sizes that are None are the target's own.

    Attributes:
        arch: `llama`, or `qwen3` for per-head norms on queries and keys.
        num_layers: decoder layers of the draft.
        draft_vocab_size: tokens that the draft can propose; None is the target's whole vocabulary.
        intermediate_size: width of the MLP.
        num_heads: query heads.
        num_kv_heads: key and value heads.
        head_dim: size of a head.
        norm_before_residual: the residual of the first layer starts from the normed features.
        norm_before_fc: RMSNorm over the concatenated auxiliary states before `fc` (vLLM 0.19 and newer).
        fc_norm: RMSNorm on each auxiliary state before `fc` (vLLM 0.25 and newer).
        norm_output: the state fed back at the next step is normed (vLLM 0.25 and newer).
        train_head: train the lm_head (it starts from the target's rows either way).
        feature_scale: divide each channel of the auxiliary states by its RMS on the first samples.
        sliding_window: tokens that a draft query looks back on, itself included; None (the default) is all of them.
    """

    arch: Literal["llama", "qwen3"] = "llama"
    num_layers: int = 1
    draft_vocab_size: int | None = 32000
    intermediate_size: int | None = None
    num_heads: int | None = None
    num_kv_heads: int | None = None
    head_dim: int | None = None
    norm_before_residual: bool = True
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    train_head: bool = False
    feature_scale: bool = True
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        """Refuse sizes below one and norm flags that exclude each other."""
        check_numbers(
            "model.draft",
            self,
            num_layers=COUNT,
            draft_vocab_size=COUNT,
            intermediate_size=COUNT,
            num_heads=COUNT,
            num_kv_heads=COUNT,
            head_dim=COUNT,
            sliding_window=COUNT,
        )
        if self.norm_before_fc and self.fc_norm:
            raise ConfigError("model.draft.fc_norm", True, "it excludes norm_before_fc", "Set one of the two to false.")


@dataclass(frozen=True)
class LossOptions:
    """Test-time training.

    Attributes:
        ttt_steps: steps K that the draft is unrolled in training; serve with at most as many speculative tokens.
        ttt_decay: weight of step k, counted from 1, is ttt_decay ** (k - 1).
        attention: `sdpa` (any device and dtype), `flash` (CUDA, bf16) or `auto` (flash for bf16 on CUDA, else sdpa).
        checkpoint_steps: recompute each step's layer in the backward pass (less memory, more time).
    """

    ttt_steps: int = 3
    ttt_decay: float = 1.0
    attention: Literal["auto", "sdpa", "flash"] = "auto"
    checkpoint_steps: bool = False

    def __post_init__(self) -> None:
        """Refuse an empty unroll and a decay outside (0, 1]."""
        check_numbers("model.loss", self, ttt_steps=COUNT, ttt_decay=POSITIVE_SHARE)


@dataclass(frozen=True)
class OptimOptions:
    """The optimizer and its schedule. Gradient clipping and accumulation are the Trainer's own options.

    Attributes:
        name: `adamw`, or `muon` (for the matrices; AdamW for the rest).
        lr: peak learning rate.
        weight_decay: decoupled weight decay on matrices.
        betas: AdamW's moments.
        warmup_steps: optimizer steps of linear warm-up.
        schedule: after the warm-up, `cosine` or `linear` to `final_lr_ratio` at trainer.max_steps or, on a single rank,
            at trainer.max_time; or `constant`.
        final_lr_ratio: learning rate at the end over the peak.
    """

    name: Literal["adamw", "muon"] = "adamw"
    lr: float = 1e-4
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    warmup_steps: int = 100
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    final_lr_ratio: float = 0.05

    def __post_init__(self) -> None:
        """Refuse senseless numbers."""
        check_numbers(
            "model.optim",
            self,
            lr=POSITIVE,
            weight_decay=NOT_NEGATIVE,
            betas=SHARE_BELOW_ONE,
            warmup_steps=NOT_NEGATIVE,
            final_lr_ratio=SHARE,
        )


@dataclass(frozen=True)
class SourceOptions:
    """One source of prompts.

    Attributes:
        path: a JSONL, JSON or Parquet file; a directory of them, or one that `datasets` saved; the name of a hub data
            set; a directory of states that this project or speculators stored; or `self`, prompts that the target
            writes.
        weight: share of the samples that come from here, relative to the other sources; None is in proportion to size.
        fields: our key -> the data set's key, where they differ, for example {"messages": "dialog"}.
        subset: configuration of a hub data set.
        split: of a data set that has several.
        streaming: read a hub data set or a directory in order, with a shuffle buffer, without storing it first.
        layers: of stored states without a cache.json: auxiliary layer ids of the files, the last one excluded.
        layer_convention: what those numbers mean, `output` or `vllm`; never guessed.
    """

    path: str
    weight: float | None = None
    fields: dict[str, str] = field(default_factory=dict)
    subset: str | None = None
    split: str = "train"
    streaming: bool = False
    layers: list[int] | None = None
    layer_convention: Convention | None = None

    def __post_init__(self) -> None:
        """Refuse weights that are not positive, and null."""
        refuse_null("data.prompts.train", self)
        if self.weight is not None and not 0 < self.weight < math.inf:
            raise ConfigError(
                "data.prompts.train.weight", self.weight, "a share must be positive and finite", "Leave the source out."
            )


@dataclass(frozen=True)
class SynthesisOptions:
    """Prompts that the target writes itself: its chat template up to the user's turn is all it is given.

    Attributes:
        num_prompts: prompts to keep, after filtering.
        min_tokens: shortest prompt.
        max_tokens: longest prompt; one that is not finished by then is thrown away.
        temperature: of the sampling; higher is more varied and less sensible.
        top_p: nucleus sampling; below 1 vLLM sorts the vocabulary for each token, which halves its speed on a CPU.
        top_k: most likely tokens to choose from; 0 is all of them.
        seed: of the sampling, where the engine can be seeded.
    """

    num_prompts: int = 2000
    min_tokens: int = 4
    max_tokens: int = 128
    temperature: float = 0.9
    top_p: float = 1.0
    top_k: int = 50
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse senseless numbers and a longest prompt below the shortest."""
        check_numbers(
            "data.prompts.synthesis",
            self,
            num_prompts=COUNT,
            min_tokens=COUNT,
            max_tokens=COUNT,
            temperature=POSITIVE,
            top_p=POSITIVE_SHARE,
            top_k=Range(-1),
        )
        if self.max_tokens < self.min_tokens:
            raise ConfigError(
                "data.prompts.synthesis.max_tokens",
                self.max_tokens,
                f"it is less than min_tokens ({self.min_tokens})",
                "Raise max_tokens or lower min_tokens.",
            )


@dataclass(frozen=True)
class PromptOptions:
    """Where the prompts come from.

    Attributes:
        train: a source or a list of them, each a path or a SourceOptions; `self` lets the target write them. Rows hold
            `messages`, `conversations`, `prompt` (with or without `response`), `text` or `ids`.
        val: sources of held-out prompts; empty takes `val_fraction` of `train` by a stable hash of each sample.
        val_fraction: share held out when `val` is empty; at least one of ten or more samples, unless it is 0.
        max_val_samples: at most so many validation samples are made and kept in memory.
        chat_template_kwargs: passed to the chat template, for example {"enable_thinking": false}.
        synthesis: how `self` is written.
    """

    train: list[str | SourceOptions] | SourceOptions | str
    val: list[str | SourceOptions] | SourceOptions | str = field(default_factory=list)
    val_fraction: float = 0.02
    max_val_samples: int = 64
    chat_template_kwargs: dict[str, str | bool | int | float] = field(default_factory=dict)
    synthesis: SynthesisOptions = field(default_factory=SynthesisOptions)

    def __post_init__(self) -> None:
        """Refuse senseless numbers."""
        check_numbers("data.prompts", self, val_fraction=SHARE_BELOW_ONE, max_val_samples=COUNT)


@dataclass(frozen=True)
class CacheOptions:
    """Made samples on disk, in the files that speculators reads; what is there is not made again.

    Attributes:
        dir: the directory; None keeps nothing.
        max_gib: no sample is added beyond this size.
        dtype: `target` keeps the states bit for bit, `fp8` in half the space (one scale for each token).
    """

    dir: Path | None = None
    max_gib: float = 100.0
    dtype: Literal["target", "fp8"] = "target"

    def __post_init__(self) -> None:
        """Refuse senseless numbers."""
        check_numbers("data.cache", self, max_gib=POSITIVE)


@dataclass(frozen=True)
class SamplingOptions:
    """How a sample is made from a prompt.

    Attributes:
        mode: `generate` (the target answers; states of prompt and answer captured in one pass) or `prefill` (a given
            conversation).
        max_new_tokens: longest answer in generate mode.
        temperature: 0 is greedy.
        top_p: nucleus sampling.
        top_k: 0 is off, and so is -1 (as in vLLM).
    """

    mode: Literal["generate", "prefill"] = "generate"
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0

    def __post_init__(self) -> None:
        """Refuse senseless numbers."""
        check_numbers(
            "data.sampling", self, max_new_tokens=COUNT, temperature=NOT_NEGATIVE, top_p=POSITIVE_SHARE, top_k=Range(-1)
        )


@dataclass(frozen=True)
class EngineOptions:
    """The vLLM engine that runs the target.

    Attributes:
        max_model_len: longest prompt plus answer, in tokens.
        max_num_seqs: requests that vLLM runs at once.
        max_num_batched_tokens: tokens of one forward pass; None is vLLM's default.
        tensor_parallel_size: GPUs that share the target.
        gpu_memory_utilization: share of the GPU's memory that vLLM may take, trainer on the same GPU or not.
        kv_cache_gib: KV cache on the CPU, in whole GiB.
        dtype: `auto` is the checkpoint's own.
        enforce_eager: no compilation and no CUDA graphs (always so on the CPU).
        cpu_threads: OpenMP threads of the engine on the CPU; None leaves it to vLLM.
        extra: further vLLM engine arguments; those that this project sets itself are refused.
        start_timeout_s: longest wait for the engine to start.
        step_timeout_s: longest wait for the next finished request while work is outstanding.
    """

    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int | None = None
    tensor_parallel_size: int = 1
    gpu_memory_utilization: float = 0.5
    kv_cache_gib: int = 1
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    enforce_eager: bool = False
    cpu_threads: int | None = None
    extra: dict[str, str | bool | int | float] = field(default_factory=dict)
    start_timeout_s: float = 600.0
    step_timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse senseless numbers."""
        check_numbers(
            "data.engine",
            self,
            max_model_len=Range(2),
            max_num_seqs=COUNT,
            max_num_batched_tokens=COUNT,
            tensor_parallel_size=COUNT,
            gpu_memory_utilization=POSITIVE_SHARE,
            kv_cache_gib=COUNT,
            cpu_threads=COUNT,
            start_timeout_s=POSITIVE,
            step_timeout_s=POSITIVE,
        )


@dataclass(frozen=True)
class QueueOptions:
    """The shared memory between vLLM and the trainer.

    Attributes:
        capacity_tokens: token rows that the arena holds; a row is (auxiliary layers + 1) * hidden * dtype bytes.
        block_tokens: tokens of one block; a sample owns whole blocks.
        max_dropped_share: the run fails when more than this share of the samples had to be dropped (after 100 samples).
        socket_dir: directory for the control socket, private to the user; None makes one under the system's.
    """

    capacity_tokens: int = 65536
    block_tokens: int = 64
    max_dropped_share: float = 0.05
    socket_dir: Path | None = None

    def __post_init__(self) -> None:
        """Refuse senseless numbers."""
        check_numbers("data.queue", self, capacity_tokens=COUNT, block_tokens=COUNT, max_dropped_share=SHARE)


@dataclass(frozen=True)
class BatchOptions:
    """How samples become micro-batches.

    Attributes:
        pack_tokens: slots of one micro-batch; a sample longer than that is dropped as too_long.
        static_shapes: pad every micro-batch to `pack_tokens` (needed by compiled steps); false trims the padding.
        calibration_tokens: token rows of the first samples from which draft vocabulary and feature scale are taken;
            they stay queued and are trained on.
        max_restarts: how often a dead producer is started again.
    """

    pack_tokens: int = 8192
    static_shapes: bool = True
    calibration_tokens: int = 32768
    max_restarts: int = 0

    def __post_init__(self) -> None:
        """Refuse senseless numbers."""
        check_numbers("data.batch", self, pack_tokens=Range(2), calibration_tokens=COUNT, max_restarts=NOT_NEGATIVE)
