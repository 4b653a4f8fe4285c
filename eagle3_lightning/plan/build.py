"""A run's plan: the options of `eagle3 fit` in, sizes, verdicts and estimates out. Nothing is started or loaded."""

import math
from dataclasses import dataclass, replace

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.export.start import read_start
from eagle3_lightning.layers import LayerPlan, plan_layers
from eagle3_lightning.options import PromptOptions
from eagle3_lightning.plan.check import check_data, check_export
from eagle3_lightning.plan.lengths import read_lengths
from eagle3_lightning.plan.memory import GIB, Item, Precision, engine_items, trainer_items
from eagle3_lightning.plan.run import PlanOptions, Run
from eagle3_lightning.plan.shape import TargetShape, read_shape
from eagle3_lightning.plan.speed import Lengths, Producer, Rates, Trainer, estimate_producer, estimate_trainer
from eagle3_lightning.stream.arena import ArenaLayout, available_memory_bytes

H200 = Rates(745e12, 4.8e12, "one H200: 745 TFLOP/s measured (docs/training.md), 4.8 TB/s by its data sheet")
DEFAULT_BATCHED_TOKENS = 8192  # of vLLM on a large GPU, where nothing is given
LAUNCH_BOUND_STEP_S, LAUNCH_BOUND_DECODE_S = 20e-3, 3e-3  # below these, arithmetic no longer tells the time
PROCESSES_BYTES = 6 * GIB  # Python, torch and vLLM in the trainer, the producer and vLLM's processes
PROCESSES_CPU_BYTES = 3 * GIB


@dataclass(frozen=True)
class Budget:
    """A part of a device's memory and what goes into it.

    Attributes:
        name: whose part.
        num_bytes: its size; None is not known.
        items: what goes in.
        remedies: what makes it smaller, or the part larger.
    """

    name: str
    num_bytes: float | None
    items: tuple[Item, ...]
    remedies: tuple[str, ...] = ()

    @property
    def used_bytes(self) -> float:
        """Everything that goes in."""
        return sum(item.num_bytes for item in self.items)

    @property
    def fits(self) -> bool:
        """Whether it does; a part of unknown size takes everything."""
        return self.num_bytes is None or self.used_bytes <= self.num_bytes


@dataclass(frozen=True)
class Device:
    """A GPU, several that are alike, or the host."""

    name: str
    memory_bytes: float | None
    budgets: tuple[Budget, ...]


@dataclass(frozen=True)
class Cache:
    """The KV cache on each of vLLM's devices."""

    token_bytes: float
    num_tokens: float
    num_sequences: float  # of max_model_len


@dataclass(frozen=True)
class Plan:
    """Everything that `eagle3 plan` prints.

    Attributes:
        shape: of the target.
        draft: sizes of the draft.
        layers: the auxiliary layers.
        engine_bits: the dtype that the engine runs in.
        devices: GPUs and host.
        cache: vLLM's KV cache.
        lengths: of a sample, as given or assumed.
        assumed: whether the lengths are.
        producer: None without rates.
        trainer: None without rates.
        rates: of the card.
        shared: vLLM and the trainer share a GPU or the CPU, so that their times add up.
        on_cpu: they share the CPU.
        launch_bound: steps are so short that launches and Python set their pace, which the estimate leaves out.
        tokens: slots that the run trains on; None if its options do not say.
        notes: what the reader must know.
    """

    shape: TargetShape
    draft: DraftConfig
    layers: LayerPlan
    engine_bits: str
    devices: tuple[Device, ...]
    cache: Cache
    lengths: Lengths
    assumed: bool
    producer: Producer | None
    trainer: Trainer | None
    rates: Rates | None
    shared: bool
    on_cpu: bool
    launch_bound: bool
    tokens: float | None
    notes: tuple[str, ...]

    @property
    def fits(self) -> bool:
        """Whether everything does."""
        return all(budget.fits for device in self.devices for budget in device.budgets)

    @property
    def seconds_per_sample(self) -> float | None:
        """On a GPU or a CPU that both sides share, one after the other; else the slower side."""
        if self.producer is None or self.trainer is None:
            return None
        both = self.producer.seconds_per_sample, self.trainer.seconds_per_sample
        return sum(both) if self.shared else max(both)

    @property
    def tokens_per_s(self) -> float | None:
        """Slots trained on."""
        seconds = self.seconds_per_sample
        return None if seconds is None else self.lengths.slots / seconds


def make_plan(run: Run, options: PlanOptions) -> Plan:
    """Put the plan together.

    Args:
        run: what `eagle3 fit` was asked for.
        options: of the plan.

    Raises:
        ConfigError: a target that cannot be read, or options that do not fit it.
    """
    shape = read_shape(run.target, run.engine.dtype)
    draft = DraftConfig.resolve(run.draft, shape.info)
    layers = plan_layers(run.target.layers, shape.info.num_layers, run.target.layer_convention)
    if run.init_from is not None:
        read_start(run.init_from, draft, shape.info.num_layers, layers)
    check_export(draft, run.vllm_version)
    check_data(shape.info, run.prompts, run.sampling, run.engine, run.queue, run.batch, run.cache)
    lengths, assumed = read_lengths(run, options)
    rates = _rates(run, options)
    engine_bits = shape.info.dtype if run.engine.dtype == "auto" else run.engine.dtype
    value = _value_bytes(engine_bits)
    kv_value = 1.0 if "fp8" in str(run.engine.extra.get("kv_cache_dtype", "")) else float(value)
    tensor_parallel = run.engine.tensor_parallel_size
    engine = _engine_budget(run, options, shape, len(layers.aux) + 1, value)
    cache = _cache(run, shape.kv_bytes(tensor_parallel, kv_value), engine)
    arena = ArenaLayout(
        -(-run.queue.capacity_tokens // run.queue.block_tokens), run.queue.block_tokens, len(layers.aux) + 1,
        shape.info.hidden_size, engine_bits,
    )  # fmt: skip
    shared = not run.on_cpu and bool(set(run.trainer_gpus) & set(range(tensor_parallel)))
    producer, trainer, launch_bound = None, None, False
    if rates is not None:
        limits = {
            "data.engine.max_num_seqs": float(run.engine.max_num_seqs),
            "the KV cache": cache.num_tokens / (lengths.prompt + lengths.answer / 2),
            "data.queue.capacity_tokens": arena.num_rows / (lengths.prompt + max(1, _longest_answer(run))),
        }
        producer = estimate_producer(shape, rates, lengths, tensor_parallel, limits, kv_value)
        trainer = estimate_trainer(draft, run.loss.ttt_steps, rates, lengths, 1 if run.on_cpu else run.ranks)
        launch_bound = _is_launch_bound(run, lengths, producer, trainer)
    tokens = None if run.max_steps < 0 else float(run.max_steps * run.accumulate * run.batch.pack_tokens * run.ranks)
    return Plan(
        shape, draft, layers, engine_bits, _place(run, options, shape, draft, engine, cache, arena), cache, lengths,
        assumed, producer, trainer, rates, shared or run.on_cpu, run.on_cpu, launch_bound, tokens,
        (*run.notes, *shape.notes),
    )  # fmt: skip


def _is_launch_bound(run: Run, lengths: Lengths, producer: Producer, trainer: Trainer) -> bool:
    """Whether a step of the trainer or of the decoding is too short for its arithmetic to tell its time."""
    step_s = trainer.seconds_per_sample * run.ranks / lengths.slots * run.batch.pack_tokens
    return not run.on_cpu and (step_s < LAUNCH_BOUND_STEP_S or producer.step_s < LAUNCH_BOUND_DECODE_S)


def _cache(run: Run, token_bytes: float, budget: Budget) -> Cache:
    """What is left of vLLM's part, or on the CPU its option, as tokens."""
    left = run.engine.kv_cache_gib * GIB if run.on_cpu else (budget.num_bytes or 0.0) - budget.used_bytes
    tokens = max(0.0, left) / token_bytes
    return Cache(token_bytes, tokens, tokens / run.engine.max_model_len)


def _longest_answer(run: Run) -> int:
    return run.sampling.max_new_tokens if run.sampling.mode == "generate" else 0


def _rates(run: Run, options: PlanOptions) -> Rates | None:
    if options.matrix_tflops is not None and options.bandwidth_gb_s is not None:
        return Rates(options.matrix_tflops * 1e12, options.bandwidth_gb_s * 1e9, "as given")
    return None if run.on_cpu else H200


def _value_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _engine_budget(run: Run, options: PlanOptions, shape: TargetShape, captured: int, value: int) -> Budget:
    """vLLM's part of each of its devices, the KV cache not yet in it."""
    batched = run.engine.max_num_batched_tokens or min(DEFAULT_BATCHED_TOKENS, 2 * run.engine.max_model_len)
    items = engine_items(shape, run.engine.tensor_parallel_size, batched, run.engine.max_num_seqs, captured, value)
    if run.on_cpu:
        return Budget("vLLM", None, tuple(items[:-1]))
    part = run.engine.gpu_memory_utilization
    remedies = (
        f"raise data.engine.gpu_memory_utilization ({part:g}) as far as the trainer leaves room",
        f"share the target between more GPUs: data.engine.tensor_parallel_size ({run.engine.tensor_parallel_size})",
        "use a quantized checkpoint",
    )
    return Budget(f"vLLM, gpu_memory_utilization {part:g}", part * options.gpu_memory_gib * GIB, tuple(items), remedies)


def _place(
    run: Run, options: PlanOptions, shape: TargetShape, draft: DraftConfig, engine: Budget, cache: Cache,
    arena: ArenaLayout,
) -> tuple[Device, ...]:  # fmt: skip
    """Everything on its device."""
    precision = Precision(run.master_bytes, run.compute_bytes, _value_bytes(shape.info.dtype))
    trainer = trainer_items(
        draft, run.loss, precision, run.optim.name, run.batch.pack_tokens, run.ranks, on_cpu=run.on_cpu
    )
    host = _host_items(run, shape, arena)
    if run.on_cpu:
        if run.ranks > 1:  # which share the memory
            each = f"{run.ranks} ranks"
            trainer = [
                replace(item, num_bytes=run.ranks * item.num_bytes, detail=f"{item.detail}, {each}".removeprefix(", "))
                for item in trainer
            ]
        kv = Item("KV cache, data.engine.kv_cache_gib", run.engine.kv_cache_gib * GIB)
        items = (*engine.items, kv, *trainer, *host)
        available = options.host_memory_gib * GIB if options.host_memory_gib else float(available_memory_bytes())
        remedies = ("lower data.engine.kv_cache_gib, data.queue.capacity_tokens or data.batch.pack_tokens",)
        return (Device("host", available, (Budget("everything", available, items, remedies),)),)
    return (*_gpus(run, options, engine, cache, trainer), Device(
        "host", options.host_memory_gib and options.host_memory_gib * GIB,
        (Budget("everything", options.host_memory_gib and options.host_memory_gib * GIB, tuple(host),
                (f"lower data.queue.capacity_tokens ({run.queue.capacity_tokens})",)),),
    ))  # fmt: skip


def _gpus(run: Run, options: PlanOptions, engine: Budget, cache: Cache, trainer: list[Item]) -> list[Device]:
    """The GPUs, those with the same contents as one line."""
    memory, ours = options.gpu_memory_gib * GIB, set(range(run.engine.tensor_parallel_size))
    assert engine.num_bytes is not None
    least_kv = cache.token_bytes * run.engine.max_model_len
    kv = Item(
        "KV cache", max(least_kv, engine.num_bytes - engine.used_bytes),
        detail=f"{cache.token_bytes / 1024:,.1f} KiB a token",
    )  # fmt: skip
    vllm = Budget(engine.name, engine.num_bytes, (*engine.items, kv), engine.remedies)
    if 0 in run.trainer_gpus:
        run.notes.append(_utilization(engine.used_bytes + least_kv, sum(item.num_bytes for item in trainer), memory))
    remedies = (
        f"lower data.batch.pack_tokens ({run.batch.pack_tokens})",
        *(() if run.loss.checkpoint_steps else ("set model.loss.checkpoint_steps to true",)),
        f"lower data.engine.gpu_memory_utilization ({run.engine.gpu_memory_utilization:g}), if vLLM can spare it",
        "or let another GPU train: trainer.devices",
    )
    kinds: dict[tuple[bool, bool], list[int]] = {}
    for gpu in sorted(ours | set(run.trainer_gpus)):
        kinds.setdefault((gpu in ours, gpu in run.trainer_gpus), []).append(gpu)
    devices = []
    for (serves, trains), numbers in sorted(kinds.items(), key=lambda entry: entry[1]):
        left = memory - (engine.num_bytes if serves else 0.0)
        budgets = ([vllm] if serves else []) + ([Budget("trainer", left, tuple(trainer), remedies)] if trains else [])
        name = f"GPU {numbers[0]}" if len(numbers) == 1 else f"GPUs {', '.join(map(str, numbers))}, each"
        devices.append(Device(name, memory, tuple(budgets)))
    return devices


def _utilization(vllm: float, trainer: float, memory: float) -> str:
    """Between which values vLLM's share of a GPU may lie that the trainer is on, too."""
    least, most = math.ceil(100 * vllm / memory) / 100, math.floor(100 * (1 - trainer / memory)) / 100
    option = "data.engine.gpu_memory_utilization"
    if least > most:
        return f"no {option} lets both onto a GPU of {memory / GIB:,.1f} GiB"
    return f"{option} may lie between {least:.2f} (one sequence of full length) and {most:.2f} (the trainer's part)"


def _host_items(run: Run, shape: TargetShape, arena: ArenaLayout) -> list[Item]:
    held_out = PromptOptions("").max_val_samples if run.prompts is None else run.prompts.max_val_samples
    rows = held_out * min(run.engine.max_model_len, run.batch.pack_tokens)
    items = [
        Item("arena", arena.total_bytes, detail=f"{arena.num_rows:,} rows of {arena.row_bytes / 1024:,.0f} KiB"),
        Item("batches put together", 2 * run.ranks * run.batch.pack_tokens * arena.row_bytes),
        Item("held-out samples, at most", run.ranks * rows * arena.row_bytes),
        Item("processes", PROCESSES_CPU_BYTES if run.on_cpu else PROCESSES_BYTES, estimated=True),
    ]
    if not shape.info.tie_word_embeddings:
        size = shape.info.vocab_size * shape.info.hidden_size * _value_bytes(shape.info.dtype)
        items.insert(1, Item("the target's lm_head, for logged steps", run.ranks * size))
    return items
