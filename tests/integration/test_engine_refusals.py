"""Engine arguments that vLLM alone can refuse: one line for the user, not the end of a log."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from serve_support import TARGET, export_echo

pytestmark = pytest.mark.vllm


def refusal(arguments: list[str]) -> str:
    """The last line of a command that ends with a mistake of the user's; nothing of a traceback is printed before."""
    done = subprocess.run([sys.executable, "-m", "eagle3_lightning", *arguments], capture_output=True, text=True)
    assert done.returncode == 2, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"max_logprob": 3}, "max_logprob = 3: this vLLM has no such engine argument. Did you mean max_logprobs?"),
        ({"max_logprobs": "abc"}, "max_logprobs = 'abc': vLLM refuses it (Input should be a valid integer"),
        ({"kv_cache_dtype": "foo"}, "kv_cache_dtype = 'foo': vLLM refuses it (Input should be 'auto'"),
    ],
)
def test_of_a_fit(tmp_path: Path, extra: dict[str, object], message: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    line = refusal(
        [
            *("fit", "--run_dir", str(tmp_path / "run"), "--target.path", str(TARGET), "--trainer.max_steps", "1"),
            *("--data.prompts.train", str(prompts), "--data.prompts.val_fraction", "0", "--trainer.accelerator", "cpu"),
            *("--model.draft.draft_vocab_size", "4096", "--model.optim.warmup_steps", "0"),
            *("--data.engine.max_model_len", "512", "--data.sampling.max_new_tokens", "8"),
            *("--data.engine.extra", json.dumps(extra)),
        ]
    )
    assert line.startswith(f"eagle3 fit: data.engine.extra.{message}")


def test_of_a_bench(tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "hello"}\n')
    draft = export_echo(tmp_path / "draft").path
    line = refusal(["bench", "--draft", str(draft), "--prompts", str(prompts), "--engine.extra", '{"foo": 1}'])
    assert line.startswith("eagle3 bench: --engine.extra.foo = 1: this vLLM has no such engine argument.")
