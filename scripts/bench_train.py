"""Measure the training step against that of speculators 0.9.0, on the same shapes and tensors, in one run.

    python scripts/bench_train.py [--json FILE] [--only ours|peer] [--cases NAME ...] [--profile FILE]

Needs CUDA, and speculators 0.9.0 for the other side. Each side runs in processes of its own, so that peak memory is
its own. They import and compile side by side; when all are ready they take turns: while one is timed, the others wait.
speculators runs in its fastest configuration that compiles within three minutes (compiled flex attention; its fused
loss did not compile in 100 s, the plain one does). What is counted as FLOPs is in docs/training.md.
"""

import argparse
import gc
import itertools
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor
from train_cases import CASES, PEER_PROCESSES, Case, flops_by_definition, flops_executed, make_batches, same_model

from eagle3_lightning.batch import Eagle3Batch

MATRIX_SIZE = 8192


def matrix_rate() -> float:
    """FLOP/s of a bf16 product of 8192 cubed, median of 20."""
    a, b = (torch.randn(MATRIX_SIZE, MATRIX_SIZE, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    return 2.0 * MATRIX_SIZE**3 / statistics.median(timed(lambda _: a @ b, 20, warm=5))


def timed(step: Callable[[int], object], count: int, warm: int) -> list[float]:
    """Seconds of each of `count` calls, one after the other without waiting between them."""
    for i in range(warm):
        step(i)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for i in range(count):
        step(i)
        events[i + 1].record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) / 1000 for a, b in itertools.pairwise(events)]


# ---- the two sides ---------------------------------------------------------------------------------------------------


Step = Callable[[Eagle3Batch], Tensor]


def our_step(case: Case, device: str = "cuda") -> tuple[Step, Callable[[], int]]:
    """A step, and a count of compiled kernels."""
    from eagle3_lightning.draft.model import Eagle3Draft
    from eagle3_lightning.draft.ttt import ttt_loss
    from eagle3_lightning.optim import StepGuard, build_optimizer, scale_gradients
    from eagle3_lightning.options import LossOptions, OptimOptions

    with torch.device(device):
        draft = Eagle3Draft(case.config(), torch.bfloat16)
        draft.embed_tokens.weight.normal_()
        teacher_head = torch.randn(32000, case.config().hidden_size, dtype=torch.bfloat16) if case.train_head else None
    options = LossOptions(case.ttt_steps, checkpoint_steps=case.checkpoint_steps)
    optimizer, guard = build_optimizer(OptimOptions(lr=1e-5), draft), StepGuard()

    def step(batch: Eagle3Batch) -> Tensor:
        assert batch.plan is not None
        loss = ttt_loss(draft, batch, batch.plan, options, torch.bfloat16, teacher_head).loss
        loss.backward()
        supervised = torch.full((), float(batch.plan.num_supervised), device=device)
        scale_gradients(optimizer, 1 / supervised, clip_norm=1.0)
        guard.check(optimizer, loss.detach(), supervised, 0, batch.sample_ids)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach() / supervised

    def compiled() -> int:
        from eagle3_lightning.draft import adamw, flash, kernels, kl, same_slot

        functions = [
            f for m in (adamw, flash, kernels, kl, same_slot) for f in vars(m).values() if hasattr(f, "device_caches")
        ]
        return sum(len(cache[0]) for f in functions for cache in f.device_caches.values())

    return step, compiled


def peer_step(case: Case) -> tuple[Step, Callable[[], int]]:
    """speculators' step, and a count of compiled graphs."""
    from speculators.config import SpeculatorsConfig, VerifierConfig
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3 import Eagle3SpeculatorConfig
    from speculators.models.eagle3.core import Eagle3DraftModel
    from speculators.proposals.greedy import GreedyTokenProposalConfig
    from transformers import LlamaConfig

    c = case.config()
    layer = LlamaConfig(
        hidden_size=c.hidden_size,
        intermediate_size=c.intermediate_size,
        num_attention_heads=c.num_heads,
        num_key_value_heads=c.num_kv_heads,
        head_dim=c.head_dim,
        num_hidden_layers=1,
        vocab_size=c.vocab_size,
        rms_norm_eps=c.rms_norm_eps,
        rope_parameters=c.rope,
        max_position_embeddings=c.max_position_embeddings,
    )
    layer._attn_implementation = "simple_flex_attention"
    model = Eagle3DraftModel(
        Eagle3SpeculatorConfig(
            transformer_layer_config=layer,
            draft_vocab_size=c.draft_vocab_size,
            norm_before_residual=True,
            eagle_aux_hidden_state_layer_ids=[2, 16, 29],
            speculators_config=SpeculatorsConfig(
                algorithm="eagle3",
                proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=case.ttt_steps)],
                default_proposal_method="greedy",
                verifier=VerifierConfig(name_or_path=None, architectures=["LlamaForCausalLM"]),
            ),
        )
    )
    in_draft = torch.arange(c.vocab_size) < c.draft_vocab_size
    model.load_vocab_mappings(in_draft, torch.zeros(c.draft_vocab_size, dtype=torch.long))
    model = model.cuda()
    for p in model.parameters():  # what it would load from its verifier starts as NaN
        torch.nn.init.normal_(p, std=0.02) if p.isnan().any() else None
    model.lm_head.requires_grad_(case.train_head)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=True)
    loss_config = resolve_loss_config("kl_div", "eager")

    def step(batch: Eagle3Batch) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            _, loss, _ = model(
                hidden_states=batch.features.flatten(1)[None],
                input_ids=batch.ids[None],
                document_ids=batch.doc[None],
                loss_mask=batch.mask[None],
                position_ids=batch.pos[None] + 1,
                verifier_last_hidden_states=batch.teacher[None],
                ttt_steps=case.ttt_steps,
                ttt_step_loss_decay=1.0,
                loss_config=loss_config,
            )
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def compiled() -> int:
        import torch._dynamo.utils as dynamo

        return int(dynamo.counters["stats"]["unique_graphs"])

    return step, compiled


def run_side(side: str, names: list[str], profile: str | None) -> None:
    """A child: make a case ready, say so, time it when told, and go on with the next."""
    previous, step, compiled = None, None, None
    for case in (c for name in names for c in CASES if c.name == name):
        if previous is None or not same_model(case, previous):
            step, compiled = None, None  # free the last model before the next is built
            gc.collect()
            torch.cuda.empty_cache()
            step, compiled = (our_step if side == "ours" else peer_step)(case)
        assert step is not None
        assert compiled is not None
        turn = Turn(step, make_batches(case, "cuda"))
        built = time.perf_counter()
        for i in range(4):
            loss = turn(i)
        torch.cuda.synchronize()
        warm, graphs, previous = time.perf_counter(), compiled(), case
        say({"ready": case.name})
        if sys.stdin.readline().strip() != "go":
            return
        result = measure_case(side, case, turn)
        say({**result, "compile_s": warm - built, "recompilations": compiled() - graphs, "loss": float(loss)})
        if profile:
            write_profile(turn, profile)
            profile = None


@dataclass
class Turn:
    """A step on one batch after the other."""

    step: Step
    batches: list[Eagle3Batch]

    def __call__(self, i: int) -> Tensor:
        """Step on the i-th batch, round and round."""
        return self.step(self.batches[i % len(self.batches)])


def measure_case(side: str, case: Case, turn: Turn) -> dict[str, Any]:
    """The figures of a case that is warm."""
    rate = matrix_rate()
    torch.cuda.reset_peak_memory_stats()
    seconds = statistics.median(timed(turn, case.num_steps, warm=2))
    plan = turn.batches[0].plan
    assert plan is not None
    defined = flops_by_definition(case, plan)
    done = flops_executed(case, plan) if side == "ours" else defined
    return {
        "side": side,
        "case": case.name,
        "tokens_per_s": case.tokens / seconds,
        "step_ms": 1e3 * seconds,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30,
        "matrix_tflops": rate / 1e12,
        "done_gflop_per_token": done / case.tokens / 1e9,
        "defined_gflop_per_token": defined / case.tokens / 1e9,
        "done_share": done / seconds / rate,
        "defined_share": defined / seconds / rate,
    }


def write_profile(step: Callable[[int], object], path: str) -> None:
    """Kernel times of three steps, as a table."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as run:
        for i in range(3):
            step(i)
        torch.cuda.synchronize()
    rows = sorted(((e.self_device_time_total / 3000, e.count / 3, e.key) for e in run.key_averages()), reverse=True)
    with open(path, "w") as file:
        for milliseconds, count, name in rows:
            if milliseconds > 0:
                file.write(f"{milliseconds:9.3f} ms a step {count:7.1f} calls  {name[:150]}\n")


def say(message: dict[str, Any]) -> None:
    """One line of JSON to the parent."""
    print(json.dumps(message), flush=True)


# ---- the parent ------------------------------------------------------------------------------------------------------


class Child:
    """A side's process and what it says."""

    def __init__(self, side: str, names: list[str], profile: str | None = None) -> None:
        command = [sys.executable, __file__, "--side", side, "--cases", *names]
        command += ["--profile", profile] if profile else []
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.ready: str | None = None  # the case that waits for its turn

    def listen(self) -> dict[str, Any] | None:
        """Its next message; None when it has ended."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("{"):
                return json.loads(line)  # type: ignore[no-any-return]
        return None

    def prepare(self) -> None:
        """Wait until a case is ready."""
        message = self.listen()
        self.ready = message["ready"] if message else None

    def go(self) -> dict[str, Any] | None:
        """Time the case that is ready, and wait until the next one is."""
        assert self.process.stdin is not None
        self.process.stdin.write("go\n")
        self.process.stdin.flush()
        result = self.listen()
        self.prepare()
        return result


def measure(ours: list[str], peer: list[list[str]], profile: str | None) -> Iterator[dict[str, Any]]:
    """Results as they come; a side that fails leaves its line out, and its error is on stderr."""
    children = [Child("ours", ours, profile)] if ours else []
    children += [Child("peer", names) for names in peer if names]
    try:
        for child in children:  # all of them, so that nobody compiles or warms up while another is timed
            child.prepare()
        for name in [c.name for c in CASES]:
            for child in children:
                if child.ready == name and (result := child.go()) is not None:
                    yield result
    finally:
        for child in children:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()


def table(results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    peer = {r["case"]: r for r in results if r["side"] == "peer"}
    heads = [
        "case",
        "side",
        "tokens/s",
        "step ms",
        "peak GiB",
        "GFLOP a token, done / defined",
        "share of matrix rate, done / defined",
        "compile s",
        "recompiled",
        "tokens/s ratio",
        "memory ratio",
    ]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    for r in results:
        other = peer.get(r["case"]) if r["side"] == "ours" else None
        ratios = (
            [f"{r['tokens_per_s'] / other['tokens_per_s']:.2f}", f"{r['peak_gib'] / other['peak_gib']:.2f}"]
            if other
            else ["", ""]
        )
        lines.append(
            "| "
            + " | ".join(
                [
                    r["case"],
                    r["side"],
                    f"{r['tokens_per_s']:,.0f}",
                    f"{r['step_ms']:.1f}",
                    f"{r['peak_gib']:.1f}",
                    f"{r['done_gflop_per_token']:.2f} / {r['defined_gflop_per_token']:.2f}",
                    f"{r['done_share']:.1%} / {r['defined_share']:.1%} of {r['matrix_tflops']:.0f} TFLOP/s",
                    f"{r['compile_s']:.0f}",
                    str(r["recompilations"]),
                    *ratios,
                ]
            )
            + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Parse, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="*", default=[c.name for c in CASES], choices=[c.name for c in CASES])
    parser.add_argument("--only", choices=["ours", "peer"])
    parser.add_argument("--json", help="write the results here")
    parser.add_argument("--profile", help="write kernel times of our first case here")
    parser.add_argument("--side", choices=["ours", "peer"], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("bench_train needs a CUDA device; this machine has none.")
    if arguments.side:
        run_side(arguments.side, arguments.cases, arguments.profile)
        return
    ours = [] if arguments.only == "peer" else arguments.cases
    peer = [] if arguments.only == "ours" else [[n for n in names if n in arguments.cases] for names in PEER_PROCESSES]
    results = []
    for result in measure(ours, peer, arguments.profile):
        results.append(result)
        print(
            f"{result['side']}: {result['case']}: {result['tokens_per_s']:,.0f} tokens/s, {result['peak_gib']:.1f} GiB",
            flush=True,
        )
    print(table(results))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump({"cases": [asdict(c) for c in CASES], "results": results}, file, indent=1)


if __name__ == "__main__":
    main()
