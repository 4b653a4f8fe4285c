"""`model.init_from`: a start computes what was exported, and what cannot be started from is refused."""

import json
from pathlib import Path

import pytest
import torch
from export_support import DRAFT_VOCAB, LAYERS, make_draft, make_target
from safetensors.torch import load_file, save_file
from test_module import DOCUMENTS, Samples, make_trainer

from eagle3_lightning.draft.model import Eagle3Draft
from eagle3_lightning.draft.vocab import Calibrator
from eagle3_lightning.errors import ConfigError
from eagle3_lightning.export.speculators import export_draft
from eagle3_lightning.export.start import load_start, open_start
from eagle3_lightning.export.verify import check_logits
from eagle3_lightning.layers import plan_layers
from eagle3_lightning.module import Eagle3Module
from eagle3_lightning.options import DraftOptions, LossOptions, OptimOptions, TargetOptions
from eagle3_lightning.target import TargetInfo, load_embeddings
from eagle3_lightning.trained import load_module

OPTIONS = {"draft_vocab_size": DRAFT_VOCAB}


@pytest.fixture
def target(tmp_path: Path) -> TargetInfo:
    return make_target(tmp_path / "target")


def export(target: TargetInfo, out: Path, **options: object) -> tuple[Eagle3Draft, Path]:
    draft = make_draft(target, **options)
    if not draft.config.feature_scale:
        draft.feature_scale.fill_(1.0)
    if options.get("train_head"):
        torch.nn.init.normal_(draft.lm_head.weight)
    done = export_draft(
        draft, out, target=target, layers=LAYERS, target_name="t", num_speculative_tokens=3, vllm_version=None
    )
    return draft, done.path


def make_module(target: TargetInfo, init_from: Path, **options: object) -> Eagle3Module:
    draft = DraftOptions(**(OPTIONS | options))  # type: ignore[arg-type]
    loss, optim = LossOptions(), OptimOptions(lr=1e-4, warmup_steps=0, schedule="constant")
    module = Eagle3Module(TargetOptions(str(target.path)), draft, loss, optim, str(init_from))
    module.check_start()  # as the command does before vLLM starts
    return module


def calibration(target: TargetInfo):
    """Of features that are scaled otherwise than those that the draft was trained on."""
    calibrator = Calibrator(target.vocab_size, 3, target.hidden_size)
    calibrator.add(list(range(50)), [(20, 50)], 3.0 * torch.randn(50, 3, target.hidden_size))
    return calibrator.result()


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"draft_vocab_size": None},
        {"feature_scale": False},
        {"norm_before_fc": True},
        {"fc_norm": True, "norm_output": True, "norm_before_residual": False},
        {"num_layers": 2, "arch": "qwen3", "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 48},
        {"sliding_window": 4},
        {"train_head": True},
    ],
    ids=str,
)
def test_training_starts_from_what_was_exported(target: TargetInfo, tmp_path: Path, options: dict[str, object]) -> None:
    draft, out = export(target, tmp_path / "draft", **options)
    module = make_module(target, out, **options)
    module.load_target()
    module.calibrate(calibration(target))
    assert torch.equal(module.draft.draft_token_ids, draft.draft_token_ids)
    if module.draft.config.feature_scale:
        assert not torch.allclose(module.draft.feature_scale, draft.feature_scale)
    check_logits(module.draft, out)  # the same vocabulary and the same logits
    inside = set(module.draft.draft_token_ids.tolist()) & set(range(20, 50))
    assert module.vocab_coverage == pytest.approx(len(inside) / 30)
    if module.teacher_head is not None:
        assert torch.equal(module.teacher_head.weight, module.target_head[module.draft.draft_token_ids])


def test_a_draft_with_another_tools_names_is_taken(target: TargetInfo, tmp_path: Path) -> None:
    _, out = export(target, tmp_path / "draft")
    tensors = {k.replace("layers.0.", "midlayer."): v for k, v in load_file(out / "model.safetensors").items()}
    tensors["embed_tokens.weight"] = load_embeddings(target)
    save_file(tensors, out / "model.safetensors")
    (out / "eagle3_lightning.json").unlink()
    module = make_module(target, out)
    module.load_target()
    module.calibrate(calibration(target))
    save_file({k.replace("midlayer.", "layers.0."): v for k, v in tensors.items() if "embed" not in k},
              out / "model.safetensors")  # fmt: skip
    check_logits(module.draft, out)


def change(out: Path, **changes: object) -> None:
    """Values of config.json; those of its transformer_layer_config by name, `...` removes."""
    config = json.loads((out / "config.json").read_text())
    for name, value in changes.items():
        where = config["transformer_layer_config"] if name in config["transformer_layer_config"] else config
        if value is ...:
            del where[name]
        else:
            where[name] = value
    (out / "config.json").write_text(json.dumps(config))


def test_a_draft_of_another_shape_is_refused_with_the_options_that_fit_it(target: TargetInfo, tmp_path: Path) -> None:
    shape = {"num_layers": 2, "norm_before_fc": True, "sliding_window": 8, "draft_vocab_size": 30}
    _, out = export(target, tmp_path / "draft", **shape)
    with pytest.raises(ConfigError) as refused:
        make_module(target, out)
    flags = str(refused.value).partition("Give its own: ")[2]
    assert flags == (
        "--model.draft.num_layers 2 --model.draft.draft_vocab_size 30 --model.draft.norm_before_fc true "
        "--model.draft.sliding_window 8."
    )
    assert "num_layers 2 (here 1)" in str(refused.value)
    make_module(target, out, **shape)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [2, 4, 6]}, r"layers \[1, 3, 5\].*--target\.layers '\[1, 3, 5\]'"),
        ({"eagle_aux_hidden_state_layer_ids": [1]}, r"layers \[0\].*Start from another draft"),
        ({"eagle_aux_hidden_state_layer_ids": [2, None, 5]}, "cannot be used"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "its rope is"),
        ({"rope_parameters": ..., "rope_theta": 1e4}, "its rope is"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "its rope is .*linear"),
        ({"partial_rotary_factor": 0.5}, None),  # beside the sizes of the layer it says nothing
        ({"rms_norm_eps": 1e-6}, "rms_norm_eps is 1e-06"),
        ({"rms_norm_eps": None}, "cannot be used"),
        ({"rms_norm_eps": 10**400}, "cannot be used"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"vocab_size": 300}, "target with vocab_size 300"),
        ({"num_attention_heads": "many"}, "cannot be used"),
        ({"intermediate_size": float("inf")}, "cannot be used"),
        ({"norm_output": "false"}, "norm_output = 'false' is neither true nor false"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "not one kind of attention for all 1 layers"),
        ({"layer_types": "sliding_attention"}, "not one kind"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 0}, "sliding_window = 0"),
        ({"model_type": "gpt2"}, r"arch gpt2 \(here llama\).*Start from another draft"),
    ],
    ids=str,
)
def test_a_draft_that_does_not_fit_is_refused(
    target: TargetInfo, tmp_path: Path, changes: dict[str, object], message: str | None
) -> None:
    _, out = export(target, tmp_path / "draft")
    change(out, **changes)
    if message is None:
        make_module(target, out)
        return
    with pytest.raises(ConfigError, match=r"model\.init_from = .*" + message):
        make_module(target, out)


@pytest.mark.parametrize(
    "options",
    [
        {"num_heads": 2, "num_kv_heads": 1},
        {"num_kv_heads": 1},
        {"head_dim": 8},
        {"intermediate_size": 48},
        {"norm_output": True},
        {"norm_before_residual": False},
        {"fc_norm": True},
        {"arch": "qwen3"},
    ],
    ids=str,
)
def test_each_option_of_the_shape_is_compared(target: TargetInfo, tmp_path: Path, options: dict[str, object]) -> None:
    _, out = export(target, tmp_path / "draft", **options)
    with pytest.raises(ConfigError) as refused:
        make_module(target, out)
    assert all(
        f"--model.draft.{name} " in str(refused.value) for name in options if name != "num_heads" or options[name] == 2
    )
    make_module(target, out, **options)


def test_what_a_config_leaves_out_is_vllms_default(target: TargetInfo, tmp_path: Path) -> None:
    _, out = export(target, tmp_path / "draft")
    change(out, norm_before_residual=..., norm_output=..., eagle_aux_hidden_state_layer_ids=..., layer_types=...)
    make_module(target, out)


def damage(out: Path, **tensors: object) -> None:
    """Replace tensors, `...` removes; dots are written as two underscores."""
    kept = load_file(out / "model.safetensors")
    for name, tensor in tensors.items():
        kept.pop(name.replace("__", "."), None)
        if tensor is not ...:
            kept[name.replace("__", ".")] = tensor
    save_file(kept, out / "model.safetensors")


def test_weights_that_would_be_left_out_or_break_the_run_are_refused(target: TargetInfo, tmp_path: Path) -> None:
    _, out = export(target, tmp_path / "draft", train_head=True)
    whole = load_file(out / "model.safetensors")
    d2t, fc = whole["d2t"], whole["fc.weight"]
    late = d2t.clone()
    late[-1] = 1000
    cases = [
        ({"layers__0__self_attn__q_proj__bias": torch.ones(64)}, "there is no place"),
        ({"layers__0__mlp__up_proj__bias": torch.ones(64)}, "there is no place"),
        ({"fc__weight": fc * float("nan")}, "not finite"),
        ({"d2t": torch.zeros_like(d2t) - torch.arange(len(d2t))}, "ascending order"),
        ({"d2t": d2t - 1000}, "ascending order"),
        ({"d2t": late}, "ascending order"),
        ({"midlayer__hidden_norm__weight": whole["norm.weight"]}, "two names"),
    ]
    for tensors, message in cases:
        save_file(whole, out / "model.safetensors")
        damage(out, **tensors)
        with pytest.raises(ConfigError, match=message):
            make_module(target, out, train_head=True)
    save_file(whole, out / "model.safetensors")
    save_file({"fc.weight": torch.zeros_like(fc)}, out / "zz.safetensors")
    with pytest.raises(ConfigError, match="several safetensors"):
        make_module(target, out, train_head=True)
    (out / "zz.safetensors").unlink()
    with (out / "model.safetensors").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ConfigError, match="cannot be read"):
        make_module(target, out, train_head=True)


def test_a_full_vocabulary_takes_no_mapping(target: TargetInfo, tmp_path: Path) -> None:
    _, out = export(target, tmp_path / "draft", draft_vocab_size=None)
    damage(out, d2t=torch.zeros(target.vocab_size, dtype=torch.int64))
    make_module(target, out, draft_vocab_size=None)
    moved = torch.zeros(target.vocab_size, dtype=torch.int64)
    moved[0], moved[1] = 1, -1
    damage(out, d2t=moved)
    with pytest.raises(ConfigError, match="ascending order"):
        make_module(target, out, draft_vocab_size=None)


def test_trained_parts_that_stay_frozen_here_are_refused(target: TargetInfo, tmp_path: Path) -> None:
    _, out = export(target, tmp_path / "draft", train_head=True)
    with pytest.raises(ConfigError, match=r"its lm_head is not the target's.*--model\.draft\.train_head true"):
        make_module(target, out)
    make_module(target, out, train_head=True)
    tensors = load_file(out / "model.safetensors")
    tensors["embed_tokens.weight"] = load_embeddings(target) + 1
    save_file(tensors, out / "model.safetensors")
    with pytest.raises(ConfigError, match="its embeddings are not the target's"):
        make_module(target, out, train_head=True)


def test_the_draft_of_another_target_and_no_draft_at_all_are_refused(target: TargetInfo, tmp_path: Path) -> None:
    _, out = export(target, tmp_path / "draft")
    other = make_target(tmp_path / "other", seed=5)
    with pytest.raises(ConfigError, match=r"trained for another checkpoint.*Name a draft of target\.path"):
        make_module(other, out)
    with pytest.raises(ConfigError, match=r"model\.init_from = .*there is no config\.json"):
        make_module(target, tmp_path / "nowhere")
    (out / "model.safetensors").unlink()
    with pytest.raises(ConfigError, match=r"there is no model\.safetensors"):
        make_module(target, out)


def test_a_fit_goes_on_where_the_draft_ended(target: TargetInfo, tmp_path: Path) -> None:
    first = Eagle3Module(
        TargetOptions(str(target.path)),
        DraftOptions(**OPTIONS),
        LossOptions(),
        OptimOptions(lr=1e-2, warmup_steps=0, schedule="constant"),
    )
    data = Samples(first, [DOCUMENTS] * 4)
    trainer = make_trainer(tmp_path, max_epochs=20)
    trainer.fit(first, datamodule=data)
    ended = float(trainer.logged_metrics["train/loss"])
    out = export_draft(
        first.draft, tmp_path / "draft", target=first.target_info, layers=plan_layers(None, 8), target_name="t",
        num_speculative_tokens=3, vllm_version=None,
    ).path  # fmt: skip
    module = make_module(target, out)
    trainer = make_trainer(tmp_path, max_steps=1, enable_checkpointing=True)
    trainer.fit(module, datamodule=data)
    began = float(trainer.logged_metrics["train/loss"])
    assert began < 1.1 * ended + 0.01
    trainer.save_checkpoint(tmp_path / "one.ckpt")
    out.rename(tmp_path / "elsewhere")
    # It has weights of its own, and remembers where they began.
    assert load_module(tmp_path / "one.ckpt").init_from == str(out)
    for given in (str(out), None):
        again = Eagle3Module(module.target_options, DraftOptions(**OPTIONS), module.loss, module.optim_options, given)
        trainer = make_trainer(tmp_path, max_steps=2, max_epochs=9)
        trainer.fit(again, datamodule=data, ckpt_path=tmp_path / "one.ckpt")
        assert (trainer.global_step, again.init_from) == (2, str(out))
    other = Eagle3Module(module.target_options, DraftOptions(**OPTIONS), module.loss, module.optim_options, "another")
    with pytest.raises(ConfigError, match=r"model\.init_from = 'another': the checkpoint's training started from"):
        make_trainer(tmp_path, max_steps=2).fit(other, datamodule=data, ckpt_path=tmp_path / "one.ckpt")


def test_without_a_fit_the_draft_itself_is_validated(target: TargetInfo, tmp_path: Path) -> None:
    options = {"feature_scale": False, "train_head": True}
    draft, out = export(target, tmp_path / "draft", **options)
    module = make_module(target, out, train_head=True)  # with a feature scale of ones, since nothing is measured
    data = Samples(module, [DOCUMENTS])
    trainer = make_trainer(tmp_path, limit_val_batches=1.0)
    trainer.validate(module, datamodule=data)
    assert torch.equal(module.draft.draft_token_ids, draft.draft_token_ids)
    check_logits(module.draft, out)
    assert module.teacher_head is not None
    assert torch.equal(module.teacher_head.weight, module.target_head[module.draft.draft_token_ids])
    assert float(trainer.logged_metrics["val/tau"]) >= 1.0


def test_what_is_trained_is_float32_whatever_was_stored(target: TargetInfo, tmp_path: Path) -> None:
    draft, out = export(target, tmp_path / "draft")
    found = open_start(str(out), draft.config, target, LAYERS)
    other = Eagle3Draft(draft.config, torch.bfloat16)
    load_start(other, found, target)
    assert {p.dtype for p in other.parameters() if p.requires_grad} == {torch.float32}
