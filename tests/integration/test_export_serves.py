"""vLLM's own loading path takes an export both ways, with a reduced and with a full draft vocabulary."""

from pathlib import Path

import msgspec
import pytest
from serve_support import TARGET, export_echo

from eagle3_lightning.options import EngineOptions
from eagle3_lightning.serve.child import run_engine
from eagle3_lightning.serve.engine_args import engine_arguments
from eagle3_lightning.serve.messages import EngineJob, EngineResult, Task

pytestmark = pytest.mark.vllm
PROMPT = [32] * 40  # zeros; after two tokens, the target goes on with them


def serve(model: str, tmp_path: Path, speculative: dict[str, object] | None) -> EngineResult:
    arguments, environment = engine_arguments(
        EngineOptions(max_model_len=96, max_num_seqs=1, dtype="float32"), on_cpu=True
    )
    if speculative is not None:
        arguments["speculative_config"] = speculative
    job = EngineJob(arguments | {"model": model}, environment, [Task("zeros", [PROMPT], 1)], 40, "", 0)
    return run_engine(job, label="export", log_file=tmp_path / "vllm.log", start_timeout_s=300, step_timeout_s=300)


@pytest.mark.parametrize("way", ["directory", "speculative_config"])
def test_vllm_serves_the_export(tmp_path: Path, way: str) -> None:
    if way == "directory":  # target and number of tokens are those that the export names
        result = serve(str(export_echo(tmp_path / "draft").path), tmp_path, None)
    else:
        full = export_echo(tmp_path / "draft", draft_vocab_size=None).path
        result = serve(str(TARGET), tmp_path, {"method": "eagle3", "model": str(full), "num_speculative_tokens": 3})
    (one,) = result.passes
    assert one.draft_tokens == 3 * one.drafts > 0
    accepted = one.accepted_tokens / one.drafts
    assert accepted > 1.5, msgspec.json.encode(one)
    assert sum(one.accepted_per_position) == one.accepted_tokens
