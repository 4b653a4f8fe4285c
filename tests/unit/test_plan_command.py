"""`eagle3 plan` on every shipped configuration, on other cards, and on what it refuses."""

import json
import runpy
from pathlib import Path
from typing import Any

import pytest
import yaml

from eagle3_lightning.cli import main

ROOT = Path(__file__).parents[2]
CONFIGS = sorted((ROOT / "configs").glob("*.yaml"))
TARGETS = runpy.run_path(str(ROOT / "scripts" / "plan_configs.py"))["TARGETS"]


def arguments(file: Path, *more: str) -> list[str]:
    """The command for a configuration whose target is not here: its config.json stands in `tests/configs`."""
    target = TARGETS[yaml.safe_load(file.read_text())["target"]["path"]]
    return ["plan", "--config", str(file), "--target.path", str(ROOT / "tests" / "configs" / target), *more]


def llama(*more: str) -> list[str]:
    return arguments(ROOT / "configs" / "llama31_8b.yaml", *more)


def planned(capsys: pytest.CaptureFixture[str], command: list[str], code: int = 0) -> dict[str, Any]:
    assert main([*command, "--json"]) == code
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("file", CONFIGS, ids=lambda file: file.stem)
def test_every_shipped_configuration_fits_and_says_so(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The estimate in its head is what the command prints."""
    assert main(arguments(file)) == 0
    text = capsys.readouterr().out
    assert "\nfits: " in text
    head = [line.removeprefix("#").strip() for line in file.read_text().splitlines() if line.startswith("#   ")]
    on_gpu = yaml.safe_load(file.read_text())["trainer"]["accelerator"] == "gpu"
    assert len(head) >= (2 if on_gpu else 1)
    printed = text.split("summary\n")[1].splitlines()
    assert head == [line.strip() for line in printed[: len(head)]], "python scripts/plan_configs.py writes it anew"


def test_the_table_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, llama("--plan.prompt_tokens", "100", "--plan.answer_tokens", "300"))
    assert plan["sample"] == {"prompt": 100, "answer": 300, "slots": 399, "assumed": False}
    assert plan["target"]["params"] == 8_030_261_248
    vllm, trainer = plan["devices"][0]["budgets"]
    assert vllm["used_bytes"] == pytest.approx(0.6 * 139 * 2**30)
    assert trainer["used_bytes"] == sum(item["num_bytes"] for item in trainer["items"])
    assert plan["kv_cache"]["token_bytes"] == 131_072
    assert plan["seconds"] == pytest.approx(20000 * 8192 / plan["tokens_per_s"])


def test_two_gpus_work_at_once_and_one_in_turn(capsys: pytest.CaptureFixture[str]) -> None:
    one, two = planned(capsys, llama()), planned(capsys, llama("--trainer.devices", "[1]"))
    assert [len(device["budgets"]) for device in one["devices"]] == [2, 1]  # GPU 0, host
    assert [device["name"] for device in two["devices"]] == ["GPU 0", "GPU 1", "host"]
    assert two["tokens_per_s"] > one["tokens_per_s"]
    sample = two["sample"]["slots"]
    seconds = [plan[side]["seconds_per_sample"] for plan in (one, two) for side in ("producer", "trainer")]
    assert one["tokens_per_s"] == pytest.approx(sample / (seconds[0] + seconds[1]))
    assert two["tokens_per_s"] == pytest.approx(sample / max(seconds[2:]))


def test_a_small_card_is_told_what_to_lower(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(llama("--plan.gpu_memory_gib", "23.5")) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text
    assert "-> lower data.batch.pack_tokens (8192)" in text
    assert "-> set model.loss.checkpoint_steps to true" in text
    assert "-> raise data.engine.gpu_memory_utilization (0.6)" in text
    lowered = ["--data.batch.pack_tokens", "1024", "--data.engine.tensor_parallel_size", "2"]
    plan = planned(capsys, llama("--plan.gpu_memory_gib", "23.5", *lowered))
    assert [budget["fits"] for budget in plan["devices"][0]["budgets"]] == [True, True]


def test_another_card(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--plan.matrix_tflops", "300", "--plan.bandwidth_gb_s", "2000"]
    slow, fast = planned(capsys, llama(*rates)), planned(capsys, llama())
    assert slow["rates"]["source"] == "as given"
    assert slow["trainer"]["tokens_per_s"] == pytest.approx(fast["trainer"]["tokens_per_s"] * 300 / 745)
    assert slow["tokens_per_s"] < fast["tokens_per_s"] / 2


def test_options_move_what_they_should(capsys: pytest.CaptureFixture[str]) -> None:
    def trainer(*more: str) -> float:
        return planned(capsys, llama(*more))["devices"][0]["budgets"][1]["used_bytes"]

    base = trainer()
    assert trainer("--model.loss.checkpoint_steps", "true") < base
    assert trainer("--data.batch.pack_tokens", "16384") > base
    assert trainer("--model.loss.ttt_steps", "7") > base
    assert trainer("--model.optim.name", "muon") < base
    assert trainer("--trainer.devices", "2") > base  # DDP's buckets
    half = planned(capsys, llama("--data.engine.extra", '{"kv_cache_dtype": "fp8"}'))
    assert half["kv_cache"]["token_bytes"] == 131_072 / 2
    prefill = planned(capsys, llama("--data.sampling.mode", "prefill"))
    assert prefill["sample"]["answer"] == 0


def test_the_real_target_is_read_where_it_lies(capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(capsys, ["plan", "--config", str(ROOT / "configs" / "quickstart.yaml"),
                            "--target.path", str(ROOT / ".cache" / "target" / "smollm2-135m")])  # fmt: skip
    assert plan["target"]["params"] == 134_515_008
    assert plan["tokens_per_s"] is None  # a CPU whose rates nobody gave
    assert [device["name"] for device in plan["devices"]] == ["host"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--plan.gpu_memory_gib", "0"], "plan.gpu_memory_gib = 0.0: it must be more than 0"),
        (["--plan.matrix_tflops", "300"], "Give both --plan.matrix_tflops and --plan.bandwidth_gb_s"),
        (["--plan.matrix_tflop", "300"], "matrix_tflop"),
        (["--target.path", "/nowhere"], "target.path = '/nowhere': there is no such directory"),
        (["--target.layers", "[5,3,1]"], "target.layers = [5, 3, 1]: the ids are not ascending"),
        (["--model.draft.draft_vocab_size", "1000000"], "the target's vocabulary has only 128256 tokens"),
        (["--trainer.precision", "16-mixed"], "trainer.precision = '16-mixed'"),
        (["--trainer.devices", "0"], "trainer.devices = 0: no GPU would train"),
        (["--model.loss.ttt_steps", "0"], "model.loss.ttt_steps = 0: it must be at least 1"),
    ],
)
def test_a_mistake_is_one_line(capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert main(llama(*more)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
    assert error.startswith("eagle3 plan: ")


def test_a_config_without_its_sizes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kimi = json.loads((ROOT / "tests" / "configs" / "kimi_k25" / "config.json").read_text())
    del kimi["text_config"]["qk_rope_head_dim"]
    (tmp_path / "config.json").write_text(json.dumps(kimi))
    assert main(llama("--target.path", str(tmp_path))) == 2
    assert "does not say how large it is (KeyError: 'qk_rope_head_dim')" in capsys.readouterr().err
    (tmp_path / "config.json").write_text("{}")
    assert main(llama("--target.path", str(tmp_path))) == 2
    assert "hidden_size = None" in capsys.readouterr().err


def quickstart(*more: str) -> list[str]:
    config, target = ROOT / "configs" / "quickstart.yaml", ROOT / ".cache" / "target" / "smollm2-135m"
    return ["plan", "--config", str(config), "--target.path", str(target), *more]


GPU = ["--trainer.accelerator", "gpu", "--trainer.devices"]
PREFILL = ["--data.sampling.mode", "prefill"]


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data.sampling.max_new_tokens", "1000"], "no prompt fits beside it into data.engine.max_model_len = 512"),
        (["--data.batch.pack_tokens", "126"], "data.batch.pack_tokens = 126: no prompt fits beside an answer"),
        (["--data.queue.capacity_tokens", "10"], "one sample of data.engine.max_model_len = 512 tokens does not fit"),
        (["--data.engine.max_model_len", "100000"], "the target takes at most 8192 tokens"),
        (["--data.engine.extra", "{model: x}"], "data.engine.extra.model = 'x': this project sets it"),
        (["--data.prompts.synthesis", "{num_prompts: 0}"], "data.prompts.synthesis.num_prompts = 0"),
        (["--data.prompts.train", "[{path: a, weight: -3}]"], "weight = -3.0: a share must be positive"),
        (["--data.prompts.val", "[b, {path: a, weight: -3}]"], "weight = -3.0: a share must be positive"),
        (["--data.cache.max_gib", "-1"], "data.cache.max_gib = -1.0: it must be more than 0"),
        (["--acceptance.concurrency", "0"], "acceptance.concurrency = 0: it must be at least 1"),
        (["--seed_everything", "-5"], "seed_everything = -5: it must lie in [0, 4294967295]"),
        (["--trainer.accumulate_grad_batches", "0"], "trainer.accumulate_grad_batches = 0: it must be at least 1"),
        (["--trainer.accelerator", "tpu"], "the options cannot be used: "),
        ([*GPU, "1", "--trainer.strategy", "nosuch"], "`strategy='nosuch'`"),
        ([*GPU, "[0,0]"], "trainer.devices = [0, 0]: a GPU is named twice"),
        ([*GPU, "abc"], "trainer.devices = 'abc': it names no GPUs"),
        ([*GPU, "[]"], "trainer.devices = []: no GPU would train"),
        ([*GPU, "[-1,0]"], "trainer.devices = [-1, 0]: no GPU would train"),
        (["--plan.prompt_tokens", "385"], "plan.prompt_tokens = 385: a longer prompt is dropped"),
        (["--plan.answer_tokens", "129"], "plan.answer_tokens = 129: an answer ends at data.sampling.max_new_tokens"),
        ([*PREFILL, "--plan.prompt_tokens", "512"], "plan.prompt_tokens = 512: a longer conversation is dropped"),
        ([*PREFILL, "--plan.prompt_tokens", "1"], "a conversation of one token trains nothing"),
        ([*PREFILL, "--plan.answer_tokens", "9"], "plan.answer_tokens = 9: in prefill mode no answer is made"),
    ],
)
def test_what_a_fit_refuses_does_not_fit(capsys: pytest.CaptureFixture[str], more: list[str], message: str) -> None:
    assert main(quickstart(*more)) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.startswith("eagle3 plan: ")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    "more",
    [
        ["--trainer.max_steps", "-1"],
        ["--trainer.max_steps", "-1", "--trainer.max_epochs", "2"],
        ["--trainer.max_time", "nonsense"],
        ["--trainer.strategy", "nosuch"],
        ["--trainer.devices", "abc"],
        ["--trainer.accelerator", "nosuch"],
        ["--trainer.barebones", "true"],
        ["--trainer.accumulate_grad_batches", "0"],
        ["--trainer.max_time", "00:00:00:00"],
        ["--trainer.limit_train_batches", "0.5"],
        ["--model.optim.warmup_steps", "5000"],
        ["--export.vllm_version", "nosuch"],
        ["--export.vllm_version", "0.19.0", "--model.draft.fc_norm", "true"],
    ],
    ids=" ".join,
)
def test_fit_says_the_same(capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str]) -> None:
    assert main(quickstart(*more)) == 2
    ours = capsys.readouterr().err
    assert main(["fit", *quickstart(*more)[1:], "--run_dir", str(tmp_path / "run")]) == 2
    theirs = capsys.readouterr().err.splitlines()[-1]
    assert ours.removeprefix("eagle3 plan: ").strip() == theirs.removeprefix("eagle3 fit: ").strip()


@pytest.mark.parametrize(
    "more",
    [
        ["--plan.prompt_tokens", "384", "--plan.answer_tokens", "128"],
        ["--data.batch.pack_tokens", "127"],
        [*PREFILL, "--plan.prompt_tokens", "511"],
        [*GPU, "0,1"],
        [*GPU, "2", "--trainer.strategy", "ddp"],
        ["--trainer.max_steps", "-1", "--trainer.max_time", "00:01:00:00"],
    ],
    ids=" ".join,
)
def test_what_just_fits_fits(capsys: pytest.CaptureFixture[str], more: list[str]) -> None:
    assert planned(capsys, quickstart(*more))["fits"]
    assert capsys.readouterr().err == ""  # nothing of the trainer that was made to check its options


def test_stored_states_leave_no_option_unread(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "data_0.pt").touch()  # by its name
    assert main(quickstart("--data.prompts.train", str(tmp_path))) == 2
    expected = "data.sampling.max_new_tokens = 128: data.prompts.train holds stored states, which are read as they are"
    assert expected in capsys.readouterr().err
    assert main(quickstart("--data.prompts.train", str(tmp_path), "--data.cache.max_gib", "3")) == 2
    assert "Leave it out, and with it data.cache.max_gib." in capsys.readouterr().err  # all of them at once
    assert main(quickstart("--data.prompts.train", str(tmp_path), "--data.sampling.max_new_tokens=512")) == 0


def test_a_draft_to_start_from_is_looked_at(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(quickstart("--model.init_from", str(tmp_path))) == 2
    assert f"model.init_from = '{tmp_path}': there is no config.json" in capsys.readouterr().err


def test_ranks_of_a_cpu_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    rates = ["--plan.matrix_tflops", "0.1", "--plan.bandwidth_gb_s", "20", "--plan.host_memory_gib", "64"]
    one, two = planned(capsys, quickstart(*rates)), planned(capsys, quickstart(*rates, "--trainer.devices", "2"))
    sizes = [
        {item["name"]: item["num_bytes"] for item in plan["devices"][0]["budgets"][0]["items"]} for plan in (one, two)
    ]
    assert {name: sizes[1][name] / size for name, size in sizes[0].items() if sizes[1][name] != size} == dict.fromkeys(
        [
            "draft: masters and gradients",
            "draft: muon",
            "draft: weights cast for a step",
            "target's embeddings and lm_head rows, frozen",
            "batch: states of two",
            "step: activations",
            "step: teacher and logits",
            "batches put together",
            "held-out samples, at most",
        ],
        2.0,
    )
    assert set(sizes[1]) - set(sizes[0]) == {"draft: buckets of DDP"}
    assert two["tokens"] == 2 * one["tokens"]
    assert two["tokens_per_s"] == one["tokens_per_s"]  # on the same cores


def test_a_cpu_does_both_and_has_rates_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(quickstart()) == 0
    assert "no estimate without the rates of this CPU" in capsys.readouterr().out
    rates = ["--plan.matrix_tflops", "0.1", "--plan.bandwidth_gb_s", "20"]
    assert main(quickstart(*rates)) == 0
    text = capsys.readouterr().out
    assert "the CPU does both" in text
    assert "GPU" not in text
    assert "minutes for 0.2 million tokens" in text
    plan = planned(capsys, quickstart(*rates))
    assert (plan["shared_gpu"], plan["on_cpu"]) == (False, True)
