"""The plan's arithmetic against real parts: checkpoints, modules, kept tensors, counted products, measured peaks."""

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from draft_helpers import make_draft
from draft_reference import make_batch, make_config
from torch.utils.flop_counter import FlopCounterMode

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.draft.plan import plan_unroll
from eagle3_lightning.draft.ttt import ttt_loss
from eagle3_lightning.optim import build_optimizer
from eagle3_lightning.options import LossOptions, OptimOptions, TargetOptions
from eagle3_lightning.plan.flops import Work, flops_defined, flops_done
from eagle3_lightning.plan.memory import (
    GIB,
    Precision,
    activation_bytes,
    export_params,
    trained_params,
    trainer_items,
)
from eagle3_lightning.plan.shape import Experts, TargetShape, read_shape
from eagle3_lightning.plan.speed import Lengths, Rates, estimate_producer
from eagle3_lightning.target import load_embeddings

ROOT = Path(__file__).parents[2]
SHAPES = ROOT / "tests" / "configs"
SMALL = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 100, "max_position_embeddings": 64, "head_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
LATENT = {
    "kv_lora_rank": 16, "q_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 12,
    "n_routed_experts": 8, "n_shared_experts": 2, "first_k_dense_replace": 3, "n_group": 2, "topk_group": 1,
}  # fmt: skip
TOYS = {
    "llama": {**SMALL, "tie_word_embeddings": True},
    "qwen2": {**SMALL, "head_dim": None, "tie_word_embeddings": False},
    "qwen3": {**SMALL, "tie_word_embeddings": False},
    "qwen3_moe": {**SMALL, **EXPERTS, "num_experts": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]},
    "mixtral": {**SMALL, "num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {**SMALL, **EXPERTS, **LATENT, "num_key_value_heads": 4, "head_dim": None},
}


def shape(name: str) -> TargetShape:
    return read_shape(TargetOptions(str(SHAPES / name)))


@pytest.mark.parametrize("family", TOYS)
def test_a_real_models_tensors_are_all_counted(family: str, tmp_path: Path) -> None:
    """Transformers builds the model from the same config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = {key: value for key, value in TOYS[family].items() if value is not None}
    config = AutoConfig.for_model(family, **settings)
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}
    names = {id(t): n for n, t in (*model.named_parameters(), *model.named_buffers())}
    counted = [t.numel() for i, t in tensors.items() if "rotary" not in names[i]]
    assert read_shape(TargetOptions(str(tmp_path))).params == sum(counted)


def test_a_real_checkpoints_bytes() -> None:
    file = ROOT / ".cache" / "target" / "smollm2-135m" / "model.safetensors"
    with file.open("rb") as lines:
        header = json.loads(lines.read(int.from_bytes(lines.read(8), "little")))
    offsets = [entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"]
    target = read_shape(TargetOptions(str(file.parent)))
    assert target.num_bytes == sum(end - start for start, end in offsets)
    assert (target.params, target.kv_bytes(1, 2.0)) == (134_515_008, 30 * 2 * 3 * 64 * 2)
    assert shape("smollm2_135m").parts == target.parts  # the shape that the tests carry is the real one


@pytest.mark.parametrize(("name", "params"), [("llama31_8b", 8_030_261_248), ("qwen3_8b", 8_190_735_360)])
def test_published_sizes(name: str, params: int) -> None:
    assert shape(name).params == params


def test_experts_latents_and_int4() -> None:
    """Kimi-K2.5: a trillion values of which a token uses 32 billion, 594 GB on disk, a latent of 576 for each layer."""
    kimi = shape("kimi_k25")
    experts = 60 * 384 * 3 * 7168 * 2048
    assert [p.params for p in kimi.parts if p.role == "expert"] == [experts]
    assert sum(p.num_bytes for p in kimi.parts if p.role == "expert") == experts * (4 + 16 / 32) / 8
    assert {p.bits for p in kimi.parts if p.role != "expert"} == {16.0}
    assert kimi.num_bytes / 1e9 == pytest.approx(594, abs=1)
    assert (kimi.active_params + 7168 * 163840) / 1e9 == pytest.approx(32, abs=0.5)
    assert kimi.kv_bytes(8, 2.0) == kimi.kv_bytes(1, 2.0) == 61 * 576 * 2
    whole = sum(p.num_bytes for p in kimi.parts if not p.sharded)
    assert kimi.gpu_bytes(8) == pytest.approx(kimi.num_bytes / 8 + whole * 7 / 8)
    assert Experts(384, 8).touched(1) == pytest.approx(8 / 384)
    assert Experts(384, 8).touched(1000) == pytest.approx(1.0)


def test_heads_and_kinds_of_quantization(tmp_path: Path) -> None:
    config = json.loads((SHAPES / "llama31_8b" / "config.json").read_text())
    llama = shape("llama31_8b")
    assert llama.kv_bytes(1, 2.0) == 131_072
    assert llama.kv_bytes(8, 2.0) == llama.kv_bytes(16, 2.0) == 131_072 / 8  # no GPU has less than a head
    plain = 2 * llama.info.vocab_size * 4096 + (2 * 32 + 1) * 4096  # embedding, lm_head, norms
    matrices = llama.params - plain
    for quantization, bits in (
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, 4 + 16 / 128),
        ({"quant_method": "unheard-of"}, 16),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": quantization}))
        found = read_shape(TargetOptions(str(tmp_path)))
        assert found.num_bytes == pytest.approx(plain * 2 + matrices * bits / 8)
        assert bool(found.notes) == (quantization["quant_method"] == "unheard-of")


# ---- the trainer -----------------------------------------------------------------------------------------------------


def toy(**changes: object) -> DraftConfig:
    return replace(make_config(), **changes)


@pytest.mark.parametrize(
    "changes", [{}, {"arch": "qwen3"}, {"num_layers": 2}, {"train_head": True}, {"fc_norm": True}], ids=str
)
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_real_modules_bytes(changes: dict[str, object], optimizer: str) -> None:
    config = toy(**changes)
    draft, _ = make_draft(config)
    parameters = [p for p in draft.parameters() if p.requires_grad]
    assert trained_params(config) == sum(p.numel() for p in parameters)
    assert export_params(config) == sum(p.numel() for p in draft.parameters())
    draft.float()
    optim = build_optimizer(OptimOptions(name=optimizer), draft)
    for p in parameters:
        p.grad = torch.ones_like(p)
    optim.step()
    states = [state for part in getattr(optim, "parts", [optim]) for state in part.state.values()]
    moments = [v for state in states for v in state.values() if isinstance(v, torch.Tensor) and v.ndim]
    items = trainer_items(config, LossOptions(), Precision(4, 4, 4), optimizer, 64, 1)
    names = {item.name: item.num_bytes for item in items}
    assert names["draft: masters and gradients"] == sum(8 * p.numel() for p in parameters)
    assert names[f"draft: {optimizer}"] == sum(v.numel() * 4 for v in moments)
    frozen = draft.embed_tokens.weight.numel() + draft.lm_head.weight.numel()  # the teacher's rows, if ours is trained
    assert names["target's embeddings and lm_head rows, frozen"] == 4 * frozen


def kept_bytes(config: DraftConfig, options: LossOptions, num_slots: int) -> int:
    """What autograd keeps of one real step for its backward pass, parameters left out."""
    draft, target_head = make_draft(config)
    batch = make_batch([[True] * num_slots], config)
    storages: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    own = {t.untyped_storage().data_ptr() for t in (*draft.parameters(), *draft.buffers(), batch.features)}
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        head = target_head[draft.draft_token_ids] if config.train_head else None
        loss = ttt_loss(draft, batch, plan_unroll(batch, options.ttt_steps), options, torch.float64, head)
    assert loss.loss.requires_grad
    return sum(size for place, size in storages.items() if place not in own)


@pytest.mark.parametrize(
    "changes", [{}, {"num_layers": 2}, {"intermediate_size": 512}, {"num_heads": 6, "num_kv_heads": 3}], ids=str
)
def test_kept_tensors_grow_as_the_formula_says(changes: dict[str, object]) -> None:
    """In the steps K, at equal slots: weights and what is common to all steps drop out of the difference."""
    config, slots = toy(**{"hidden_size": 128, "intermediate_size": 192, **changes}), 96
    kept = [kept_bytes(config, LossOptions(ttt_steps=k), slots) for k in (2, 4)]
    wanted = [activation_bytes(config, LossOptions(ttt_steps=k), 8, slots) for k in (2, 4)]
    held = 2 * config.hidden_size * 8 * slots * 2  # two steps' states and their copy, which only the forward pass holds
    assert kept[1] - kept[0] == pytest.approx(wanted[1] - wanted[0] - held, rel=0.03)


# name of the case, and its peak in GiB in the table of docs/training.md
PEAKS = {
    "8B, TTT 3": 10.8,
    "8B, TTT 3, trained head": 13.0,
    "8B, TTT 7": 15.0,
    "8B, TTT 3, one document of 32,768": 23.1,
    "Kimi-K2.5 size, TTT 7, 8,192 tokens": 33.7,
    "Kimi-K2.5 size, TTT 7, 32,768 tokens": 76.9,
}


@pytest.mark.parametrize("name", PEAKS)
def test_measured_peaks_on_an_h200(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from train_cases import CASES

    case = next(case for case in CASES if case.name == name)
    items = trainer_items(case.config(), LossOptions(case.ttt_steps), Precision(4, 2, 2), "adamw", case.tokens, 1)
    counted = sum(item.num_bytes for item in items if not item.estimated)
    counted -= case.tokens * 4 * case.config().hidden_size * 2  # the benchmark holds one batch, a run two
    assert counted / GIB == pytest.approx(PEAKS[name], rel=0.03)


@pytest.mark.parametrize("changes", [{}, {"num_layers": 2}, {"train_head": True}], ids=str)
@pytest.mark.parametrize("mask", ["1" * 24, "0" * 10 + "1" * 14])
def test_counted_flops_are_those_that_torch_counts(changes: dict[str, object], mask: str) -> None:
    """Two-dimensional products; attention's are three-dimensional here, over pairs that causal attention never sees."""
    config, options = toy(**changes), LossOptions(ttt_steps=3)
    draft, target_head = make_draft(config)
    batch = make_batch([[c == "1" for c in mask]] * 2, config)
    plan = plan_unroll(batch, options.ttt_steps)
    with FlopCounterMode(display=False) as counter:
        head = target_head[draft.draft_token_ids] if config.train_head else None
        ttt_loss(draft, batch, plan, options, torch.float64, head).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    products = sum(n for op, n in counts.items() if str(op) in ("aten.mm", "aten.addmm"))
    work = Work.of_plan(plan)
    without = replace(work, seen_by_rows=0, seen_by_slots=0)
    # Below the point where gathering pays, the head also runs over the states that are not scored.
    assert products == pytest.approx(flops_done(config, options.ttt_steps, without), rel=0.03)
    assert flops_done(config, options.ttt_steps, work) <= flops_defined(config, options.ttt_steps, work)


def test_work_of_a_sample_is_that_of_its_plan() -> None:
    config = toy()
    for prompt, answer in ((5, 3), (1, 12), (40, 20)):
        mask = [t + 1 >= prompt for t in range(prompt + answer - 1)]
        plan = plan_unroll(make_batch([mask], config), 3)
        assert Work.of_plan(plan) == Work.of_sample(prompt, answer, 3)


# ---- speed -----------------------------------------------------------------------------------------------------------


def test_the_roofline_gives_back_what_it_was_fitted_to() -> None:
    """42,281 to 42,429 prompt tokens/s, and 20,447 to 20,562 answer tokens/s with the prompts' time in them."""
    llama, h200 = shape("llama31_8b"), Rates(745e12, 4.8e12, "")
    prefill = estimate_producer(llama, h200, Lengths(2048, 0), 1, {"": 256.0}, 2.0)
    assert prefill.prefill_tokens_per_s == pytest.approx(42_355, rel=0.02)
    decode = estimate_producer(llama, h200, Lengths(64, 256), 1, {"": 256.0}, 2.0)
    assert 256 / decode.seconds_per_sample == pytest.approx(20_504, rel=0.02)


def test_attention_counts_every_head_and_layer() -> None:
    llama = shape("llama31_8b")
    assert llama.attention_flops(1000, decoding=False) == 4 * 32 * 32 * 128 * 1000
    assert math.isclose(llama.token_flops(0, decoding=True) - llama.token_flops(0, decoding=False), 2 * 128256 * 4096)


def test_embeddings_stay_in_the_targets_dtype() -> None:
    target = read_shape(TargetOptions(str(ROOT / ".cache" / "target" / "smollm2-135m")))
    table = load_embeddings(target.info)
    embedding = next(part for part in target.parts if part.role == "embedding")
    assert embedding.num_bytes == table.numel() * table.element_size()
