"""Plain vLLM, the tap, and vLLM's own extract_hidden_states, in one run on one device (`make bench-extract`).

Each variant has a process of its own, one after the other, with the same engine arguments and random prompts. Weights
are random too: only shapes matter for speed. Prefill is 96 prompts of 2,048 tokens with one token asked for, decode is
256 answers of 256 tokens at once. The tap writes its rows to an arena; each finished sample's blocks are used again.

vLLM 0.25's V2 runner refuses `extract_hidden_states`: there this variant runs on V1, beside a `plain` on V2.

`--shared` then puts a trainer on the tap's GPU (the step of `bench_train.py`, 8B shape, in a process of its own): as
many tokens as a prefill pass has are made and, at the same time, trained on. Sharing the GPU perfectly, both take as
long together as one after the other.

`--profile FILE` keeps the engine in the process of each variant and writes where one more decode pass spends its Python
time; no figure of such a run compares with those of others.

    python scripts/bench_extract.py --runner v2 --variants plain,tap,native --passes 2 --shared --json bench.json
"""

import argparse
import cProfile
import itertools
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, Any]] = {
    "llama8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "toy": {
        "vocab_size": 512,
        "hidden_size": 256,
        "intermediate_size": 512,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
    },
}
LOADS = {  # prompts, tokens of each, tokens answered
    "full": {"prefill": (96, 2048, 1), "decode": (256, 64, 256)},
    "small": {"prefill": (8, 256, 1), "decode": (16, 16, 32)},
}
VARIANTS = ("plain", "aux", "tap", "native")
SHARED_PASSES = 4  # prefill passes and as many tokens of training, alone and together


def write_config(shape: str, directory: Path) -> int:
    """Write a config.json without weights; the number of layers."""
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        **SHAPES[shape],
    }
    (directory / "config.json").write_text(json.dumps(config))
    return int(config["num_hidden_layers"])


class Bench:
    """One engine and the requests that it is timed with."""

    def __init__(self, variant: str, shape: str, directory: Path, files: Path) -> None:
        """Start the engine of a variant: `plain`, `aux` (states asked for, not captured), `tap`, `native`.

        `files` is an empty directory in memory, where `native` writes its states.
        """
        from eagle3_lightning.extract.engine import EngineSettings, VllmEngine, prepare_environment
        from eagle3_lightning.layers import default_aux_layers

        num_layers = write_config(shape, directory)
        self.vocab_size = SHAPES[shape]["vocab_size"]
        self.variant, self.files = variant, files
        aux = default_aux_layers(num_layers)
        settings = EngineSettings(
            model_path=str(directory),
            dtype="bfloat16",
            aux_layers=aux,
            num_layers=num_layers,
            max_model_len=4096,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            tensor_parallel_size=1,
            gpu_memory_utilization=0.5,
            kv_cache_gib=2,
            enforce_eager=False,
            cpu_threads=None,
            trust_remote_code=False,
            extra={"load_format": "dummy"},
        )
        prepare_environment(settings, os.getppid(), directory)
        self.pool: Any = None
        if variant in ("aux", "tap"):
            tapped = VllmEngine(settings, on_death=lambda who: os._exit(1))
            self.engine = tapped._engine
            if variant == "tap":
                self._attach(tapped, len(aux) + 1, SHAPES[shape]["hidden_size"])
        else:
            self.engine = self._untapped(settings, aux, num_layers, directory)

    def _attach(self, tapped: Any, num_layers: int, hidden_size: int) -> None:
        from eagle3_lightning.stream.arena import Arena, BlockPool

        self.arena = Arena.create(320 * 1024, 64, num_layers, hidden_size, "bfloat16")
        tapped.attach(self.arena.path, self.arena.layout)
        self.pool = BlockPool(self.arena.layout.num_blocks)

    def _untapped(self, settings: Any, aux: tuple[int, ...], num_layers: int, directory: Path) -> Any:
        from vllm import EngineArgs, LLMEngine

        more: dict[str, Any] = {}
        if self.variant == "native":
            ids = [*(i + 1 for i in aux), num_layers]
            more["speculative_config"] = {
                "method": "extract_hidden_states",
                "num_speculative_tokens": 1,
                "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": ids}},
            }
            more["kv_transfer_config"] = {
                "kv_connector": "ExampleHiddenStatesConnector",
                "kv_role": "kv_producer",
                "kv_connector_extra_config": {"shared_storage_path": str(self.files)},
            }
        arguments = EngineArgs(
            model=str(directory),
            load_format="dummy",
            skip_tokenizer_init=True,
            dtype="bfloat16",
            max_model_len=settings.max_model_len,
            max_num_seqs=settings.max_num_seqs,
            max_num_batched_tokens=settings.max_num_batched_tokens,
            gpu_memory_utilization=settings.gpu_memory_utilization,
            enable_prefix_caching=False,
            disable_log_stats=True,
            **more,
        )
        return LLMEngine.from_engine_args(arguments)

    def run(self, num_prompts: int, prompt_tokens: int, answer_tokens: int, seed: int) -> float:
        """Seconds that all requests took together."""
        import torch
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        generator = torch.Generator().manual_seed(seed)
        prompts = torch.randint(3, self.vocab_size, (num_prompts, prompt_tokens), generator=generator).tolist()
        blocks_of: dict[str, list[int]] = {}
        started_s = time.perf_counter()
        for number, prompt in enumerate(prompts):
            extra = {}
            if self.pool is not None:
                blocks = self.pool.take(self.arena.layout.blocks_for(prompt_tokens + answer_tokens))
                assert blocks is not None, "the bench's arena is too small for its own load"
                blocks_of[str(number)] = blocks
                where = {"serial": seed * 1000 + number + 1, "blocks": blocks, "prompt_tokens": prompt_tokens}
                extra = {"extra_args": {"eagle3": where}}
            sampling = SamplingParams(
                max_tokens=answer_tokens,
                temperature=0,
                ignore_eos=True,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
                **extra,
            )
            self.engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
        num_left = num_prompts
        while num_left:
            num_left -= sum(output.finished for output in self.engine.step())
        seconds = time.perf_counter() - started_s
        for number, blocks in blocks_of.items():
            self._check(int(number) + seed * 1000 + 1, blocks, prompts[int(number)])
            self.pool.give(blocks)
        for file in self.files.iterdir():
            file.unlink()
        return seconds

    def _check(self, serial: int, blocks: list[int], prompt: list[int]) -> None:
        deadline_s = time.monotonic() + 10
        while self.arena.num_written(serial, blocks) < len(prompt) and time.monotonic() < deadline_s:
            time.sleep(0.001)
        fed = self.arena.ids[self.arena.row_index(blocks, len(prompt))].tolist()
        assert fed == prompt, "the tap wrote other rows than it should have"


def write_profile(bench: Bench, load: str, seed: int, file: Path) -> None:
    """Where the Python of a decode pass spends its time, in this process."""
    profiler = cProfile.Profile()
    profiler.runcall(bench.run, *LOADS[load]["decode"], seed)
    with file.open("w") as out:
        pstats.Stats(profiler, stream=out).sort_stats("tottime").print_stats(60)


def measure(variant: str, shape: str, load: str, passes: int, profile: Path | None) -> Iterator[dict[str, Any]]:
    """Start one variant and time each load, after a warm-up."""
    seeds = itertools.count(1)
    with tempfile.TemporaryDirectory() as directory, tempfile.TemporaryDirectory(dir="/dev/shm") as files:
        started_s = time.perf_counter()
        bench = Bench(variant, shape, Path(directory), Path(files))
        yield {"variant": variant, "start_s": round(time.perf_counter() - started_s, 1)}
        bench.run(16, 128, 4, next(seeds))
        for name, (num_prompts, prompt_tokens, answer_tokens) in LOADS[load].items():
            for _ in range(passes):
                seconds = bench.run(num_prompts, prompt_tokens, answer_tokens, next(seeds))
                num_tokens = num_prompts * (prompt_tokens if name == "prefill" else answer_tokens)
                yield {"variant": variant, "load": name, "tokens_per_s": round(num_tokens / seconds, 1)}
        if profile is not None:
            write_profile(bench, load, next(seeds), profile.with_name(f"{profile.stem}-{variant}{profile.suffix}"))
        config = bench.engine.vllm_config.cache_config
        yield {"variant": variant, "num_kv_blocks": config.num_gpu_blocks, "kv_block_tokens": config.block_size}
        num_prompts, prompt_tokens, answer_tokens = LOADS[load]["prefill"]
        for _ in sys.stdin:  # a line for each turn
            started_s = time.time()
            for _ in range(SHARED_PASSES):
                bench.run(num_prompts, prompt_tokens, answer_tokens, next(seeds))
            yield {"variant": variant, "turn_s": [started_s, time.time()]}
        bench.engine.engine_core.shutdown()


def train(shape: str, load: str) -> Iterator[dict[str, Any]]:
    """The trainer: as many tokens a turn as the producer makes in one."""
    import torch
    from bench_train import Turn, our_step
    from train_cases import CASES, make_batches

    device = "cuda" if torch.cuda.is_available() else "cpu"
    case = CASES[0]
    if shape == "toy":
        from bench_ddp import make_case

        case = make_case("tiny")
    step, _ = our_step(case, device)
    turn = Turn(step, make_batches(case, device))
    num_prompts, prompt_tokens, _ = LOADS[load]["prefill"]
    num_steps = SHARED_PASSES * num_prompts * prompt_tokens // case.tokens
    for i in range(4):
        turn(i).item()
    yield {"trainer": "ready", "steps": num_steps}
    for _ in sys.stdin:
        started_s = time.time()
        for i in range(num_steps):
            loss = turn(i)
        loss.item()
        yield {"trainer": case.name, "turn_s": [started_s, time.time()]}


class Child:
    """A process of this script that takes turns."""

    def __init__(self, options: argparse.Namespace, what: str, environment: dict[str, str]) -> None:
        """Start it."""
        command = [sys.executable, __file__, "--child", what, "--shape", options.shape, "--load", options.load]
        command += ["--passes", str(options.passes)]
        if options.profile:
            command += ["--profile", str(options.profile)]
            environment = environment | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if what == "native":
            environment = environment | {"VLLM_USE_V2_MODEL_RUNNER": "0"}
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def results(self, until: str | None = None) -> Iterator[dict[str, Any]]:
        """What it says, up to a message that has `until`, or to its end."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("RESULT "):
                result = json.loads(line.removeprefix("RESULT "))
                print(result, flush=True)
                yield result
                if until is not None and until in result:
                    return

    def go(self) -> None:
        """Give it a turn."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()

    def turn(self) -> list[float]:
        """Start and end of the turn that it was given."""
        for result in self.results("turn_s"):
            if "turn_s" in result:
                return list(result["turn_s"])
        sys.exit("a process of the shared measurement ended before its turn was over")

    def end(self) -> None:
        """Let it end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()


def share_gpu(options: argparse.Namespace, producer: Child, environment: dict[str, str]) -> dict[str, float]:
    """Producer alone, trainer alone, both at once."""
    trainer = Child(options, "trainer", environment)
    if not list(trainer.results("trainer")):
        sys.exit("the trainer of the shared measurement did not start")
    seconds = []
    for child in (producer, trainer):
        child.go()
        begin, end = child.turn()
        seconds.append(end - begin)
    producer.go()
    trainer.go()
    turns = [child.turn() for child in (producer, trainer)]
    trainer.end()
    together = max(end for _, end in turns) - min(begin for begin, _ in turns)
    ideal = sum(seconds) / together
    return {"producer_s": seconds[0], "trainer_s": seconds[1], "together_s": together, "of_ideal": ideal}


def table(results: list[dict[str, Any]], variants: list[str]) -> str:
    """The figures and their share of plain, as Markdown."""
    lines = ["| variant | load | tokens/s | share of plain |", "| --- | --- | --- | --- |"]
    for load in ("prefill", "decode"):
        best = {
            v: [r["tokens_per_s"] for r in results if r["variant"] == v and r.get("load") == load] for v in variants
        }
        for variant in variants:
            if not (figures := best[variant]):
                lines.append(f"| {variant} | {load} | failed | |")
                continue
            share = f"{max(figures) / max(best['plain']):.1%}" if best.get("plain") else ""
            lines.append(f"| {variant} | {load} | {', '.join(f'{f:,.0f}' for f in figures)} | {share} |")
    for result in results:
        if "num_kv_blocks" in result:
            lines.append(f"| {result['variant']} | KV blocks | {result['num_kv_blocks']} | |")
    return "\n".join(lines)


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runner", choices=["default", "v1", "v2"], default="default", help="vLLM's model runner")
    parser.add_argument("--variants", default="plain,tap,native")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama8b")
    parser.add_argument("--load", choices=sorted(LOADS), default="full")
    parser.add_argument("--passes", type=int, default=2)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--profile", type=Path, help="text file; the variant's name is put into its own")
    parser.add_argument("--shared", action="store_true", help="also put a trainer on the tap's GPU")
    parser.add_argument("--child", choices=[*VARIANTS, "trainer"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        child = (
            train(options.shape, options.load)
            if options.child == "trainer"
            else measure(options.child, options.shape, options.load, options.passes, options.profile)
        )
        for result in child:
            print("RESULT", json.dumps(result), flush=True)
        return 0
    variants = options.variants.split(",")
    environment = dict(os.environ)
    environment.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # compiling it takes minutes
    if options.runner != "default":
        environment["VLLM_USE_V2_MODEL_RUNNER"] = "1" if options.runner == "v2" else "0"
    results, shared = [], None
    for variant in variants:
        child = Child(options, variant, environment)
        results += child.results("num_kv_blocks")
        if options.shared and variant == "tap":
            shared = share_gpu(options, child, environment)
        child.end()
    print(f"runner: {options.runner}")
    print(table(results, variants))
    if shared:
        print(
            f"one GPU for both: producer {shared['producer_s']:.2f} s and trainer {shared['trainer_s']:.2f} s alone, "
            f"{shared['together_s']:.2f} s together, {shared['of_ideal']:.1%} of the time-shared ideal"
        )
    if options.json:
        options.json.write_text(json.dumps({"runner": options.runner, "results": results, "shared": shared}, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
