"""A draft from nothing but a target: it writes its prompts, answers them, and the draft is trained and exported."""

import json
from pathlib import Path

import pytest

from eagle3_lightning.cli import main

SMOLLM2 = Path(__file__).parents[2] / ".cache/target/smollm2-135m"
pytestmark = pytest.mark.vllm


def test_fit_without_a_data_set(tmp_path, capsys, caplog):
    caplog.set_level("INFO", "eagle3_lightning")
    run_dir = tmp_path / "run"
    options = {
        "run_dir": run_dir, "target.path": SMOLLM2,
        "data.prompts.train": "self", "data.prompts.val_fraction": 0.2, "data.prompts.synthesis.num_prompts": 16,
        "data.prompts.synthesis.max_tokens": 64, "data.sampling.max_new_tokens": 24,
        "data.engine.max_model_len": 160, "data.engine.max_num_seqs": 16, "data.engine.enforce_eager": "true",
        "data.engine.cpu_threads": 1, "data.queue.capacity_tokens": 8192, "data.batch.pack_tokens": 256,
        "data.batch.static_shapes": "false", "data.batch.calibration_tokens": 400, "model.draft.draft_vocab_size": 2048,
        "model.optim.warmup_steps": 2, "trainer.accelerator": "cpu", "trainer.max_steps": 4, "trainer.logger": "false",
    }  # fmt: skip
    assert main(["fit", *(f"--{name}={value}" for name, value in options.items())]) == 0
    rows = [json.loads(line) for line in (run_dir / "self_prompts.jsonl").read_text().splitlines()]
    texts = [row["messages"][0].pop("content") for row in rows]
    assert rows == [{"id": f"self-{number}", "messages": [{"role": "user"}]} for number in range(16)]
    assert len(set(texts)) == len(texts) == 16
    assert (run_dir / "export" / "model.safetensors").is_file()
    said = capsys.readouterr().err
    assert "the target wrote its own prompts: 16 of " in said
    assert " unfinished" in said
    # The vLLM that wrote them made the samples, too, which alone are counted.
    assert caplog.text.count("vLLM starts as process") == 1
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["samples_taken"] <= summary["producer_prefill_tokens"] / 3
    assert all(name.startswith(("train ", "val ")) for names in summary["first_dropped"].values() for name in names)
    assert main(["prompts", "preview", "--config", str(run_dir / "config.yaml"), "--number=1"]) == 0
    assert "supervised" in capsys.readouterr().out
