"""vLLM's own loading path takes an export both ways, with a reduced and with a full draft vocabulary.

What it takes and serves wrongly is seen in its counters.
"""

import json
import shlex
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
import torch
from extract_support import choose_runner
from safetensors.torch import load_file, save_file
from serve_support import TARGET, export_echo

from eagle3_lightning.options import EngineOptions
from eagle3_lightning.serve.child import run_engine
from eagle3_lightning.serve.engine_args import engine_arguments
from eagle3_lightning.serve.messages import EngineJob, EngineResult, Task
from eagle3_lightning.serve.results import BenchReport, draft_figures, never_accepted, recommend
from eagle3_lightning.serve.table import as_text

pytestmark = pytest.mark.vllm
PROMPT = [32] * 40  # zeros; after two tokens, the target goes on with them


def serve(
    model: str, tmp_path: Path, speculative: dict[str, object] | None, prompts: list[list[int]] | None = None
) -> EngineResult:
    arguments, environment = engine_arguments(
        EngineOptions(max_model_len=96, max_num_seqs=1, dtype="float32"), on_cpu=True
    )
    if speculative is not None:
        arguments["speculative_config"] = speculative
    job = EngineJob(arguments | {"model": model}, environment, [Task("zeros", prompts or [PROMPT], 1)], 40, "", 0)
    return run_engine(job, label="export", log_file=tmp_path / "vllm.log", start_timeout_s=300, step_timeout_s=300)


@pytest.mark.parametrize(
    ("way", "runner", "options"),
    [
        ("directory", "v1", {}),
        ("speculative_config", "v1", {}),
        ("directory", "v2", {}),
        (
            "directory",
            "v2",
            {"num_layers": 2, "sliding_window": 32},
        ),
    ],
)
def test_vllm_serves_the_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str, runner: str, options: dict[str, int]
) -> None:
    choose_runner(monkeypatch, runner)
    if way == "directory":  # target and number of tokens are those that the export names
        result = serve(str(export_echo(tmp_path / "draft", **options).path), tmp_path, None)
    else:
        full = export_echo(tmp_path / "draft", draft_vocab_size=None).path
        result = serve(str(TARGET), tmp_path, {"method": "eagle3", "model": str(full), "num_speculative_tokens": 3})
    (one,) = result.passes
    assert one.draft_tokens == 3 * one.drafts > 0
    accepted = one.accepted_tokens / one.drafts
    assert accepted > 1.5, msgspec.json.encode(one)
    assert sum(one.accepted_per_position) == one.accepted_tokens
    assert ("Using V2 Model Runner" in (tmp_path / "vllm.log").read_text()) == (runner == "v2")


HASH = """
import json, sys
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
for line in sys.stdin:
    arguments = AsyncEngineArgs.from_cli_args(parser.parse_args(json.loads(line)))
    arguments.speculative_config = None  # what newer versions hash of a draft must not be what keeps them apart
    print("hash", arguments.create_engine_config().compute_hash())
"""


def test_compiled_code_is_not_shared_between_drafts_that_are_served_as_printed(tmp_path: Path) -> None:
    """vLLM keeps it under this hash; with code of another draft, few of a draft's tokens are accepted."""
    exports = [
        export_echo(tmp_path / "a"),
        export_echo(tmp_path / "b", norm_before_fc=True),
        export_echo(tmp_path / "c", intermediate_size=512),
    ]
    lines = []
    for export in (*exports, exports[0]):
        vllm, serve, target, *options = shlex.split(export.serve_command)
        assert (vllm, serve) == ("vllm", "serve")
        lines.append(json.dumps(["--model", target, "--enforce-eager", *options]))
    done = subprocess.run(
        [sys.executable, "-c", HASH], input="\n".join(lines), capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    a, b, c, again = (line.split()[1] for line in done.stdout.splitlines() if line.startswith("hash "))
    assert len({a, b, c}) == 3
    assert a == again


def test_a_draft_whose_vocabulary_is_another_is_said_to_be_served_wrongly(tmp_path: Path) -> None:
    """The echo draft finds nearly every zero; with its tokens mapped to others, nothing that it says is accepted."""
    draft = export_echo(tmp_path / "draft").path
    tensors = load_file(draft / "model.safetensors")
    own = torch.arange(len(tensors["d2t"]))
    tensors["d2t"] = (own + tensors["d2t"]).roll(1000) - own
    save_file(tensors, draft / "model.safetensors")
    prompts = [PROMPT[:length] for length in (40, 30, 20)]
    (one,) = serve(str(draft), tmp_path, None, prompts).passes
    assert (one.draft_tokens, one.accepted_tokens) == (3 * one.drafts, 0)
    figures = draft_figures(3, "zeros", one, one, [], "float32")
    assert never_accepted([figures]) == [3]
    report = BenchReport(
        str(draft), "t", 3, 40, "float32", "cpu", "0.32.0", [1.0], [figures], recommend([figures]), True,
        never_accepted=never_accepted([figures]),
    )  # fmt: skip
    assert f"NOT ONE drafted token was accepted in {one.drafts} rounds with K = 3" in as_text(report)
