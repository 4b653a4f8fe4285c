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
