"""A plan for people, and the lines of it that stand in the shipped configurations."""

import math
from dataclasses import asdict
from typing import Any

from eagle3_lightning.plan.build import Budget, Device, Plan
from eagle3_lightning.plan.memory import GIB, export_params, trained_params

_NAME_WIDTH = 46


def as_text(plan: Plan) -> str:
    """The whole plan."""
    info = plan.shape.info
    lines = [*_head(plan), ""]
    for device in plan.devices:
        lines += _device(device)
    lines += [
        f"KV cache     {plan.cache.num_tokens:,.0f} tokens: {plan.cache.num_sequences:,.1f} sequences of the full "
        f"data.engine.max_model_len, or {plan.cache.num_tokens / _mean_tokens(plan):,.0f} of the mean length",
        "",
        *_speed(plan),
        "",
        "summary",
        *(f"  {line}" for line in summary(plan)),
        "",
        *(f"note: {note}" for note in plan.notes),
        "Counted from shapes, but for the items marked ~, which are rules of thumb. The trainer's peaks were measured "
        "at 10.8 GiB (8B shape, 3 steps) and 33.7 and 76.9 GiB (Kimi-K2.5 size, 7 steps, 8k and 32k tokens), contexts "
        "left out; this arithmetic gives 98 to 99 % of them. Speed is a roofline, not a measurement.",
        f"{'fits' if plan.fits else 'DOES NOT FIT'}: {info.name}",
    ]
    return "\n".join(lines)


def summary(plan: Plan) -> list[str]:
    """The estimate that a configuration carries."""
    lines = [
        f"{device.name}: {'; '.join(_brief(plan, budget) for budget in device.budgets)}" for device in plan.devices
    ]
    if plan.rates is None or plan.launch_bound:
        return lines
    return [*lines, *(" ".join(line.split()) for line in _speed(plan)[-2:])]


def as_dict(plan: Plan) -> dict[str, Any]:
    """For `--json`: bytes, seconds and counts, nothing rounded."""
    info = plan.shape.info
    return {
        "fits": plan.fits,
        "target": {
            "name": info.name, "params": plan.shape.params, "active_params": plan.shape.active_params,
            "weight_bytes": plan.shape.num_bytes, "quantization": plan.shape.quantization, "dtype": plan.engine_bits,
        },
        "draft": {
            **plan.draft.as_dict(), "aux_layers": list(plan.layers.aux),
            "trained_params": trained_params(plan.draft), "export_params": export_params(plan.draft),
        },
        "devices": [
            {"name": device.name, "memory_bytes": device.memory_bytes, "budgets": [
                {**asdict(budget), "used_bytes": budget.used_bytes, "fits": budget.fits} for budget in device.budgets
            ]} for device in plan.devices
        ],
        "kv_cache": asdict(plan.cache),
        "sample": {**asdict(plan.lengths), "slots": plan.lengths.slots, "assumed": plan.assumed},
        "rates": None if plan.rates is None else asdict(plan.rates),
        "producer": None if plan.producer is None else asdict(plan.producer),
        "trainer": None if plan.trainer is None else asdict(plan.trainer),
        "shared_gpu": plan.shared and not plan.on_cpu,
        "on_cpu": plan.on_cpu,
        "launch_bound": plan.launch_bound,
        "tokens_per_s": plan.tokens_per_s,
        "tokens": plan.tokens,
        "seconds": None if plan.tokens is None or plan.tokens_per_s is None else plan.tokens / plan.tokens_per_s,
        "notes": list(plan.notes),
    }  # fmt: skip


def _mean_tokens(plan: Plan) -> float:
    return plan.lengths.prompt + plan.lengths.answer


def _head(plan: Plan) -> list[str]:
    shape, info, draft = plan.shape, plan.shape.info, plan.draft
    active = f", {shape.active_params / 1e9:,.1f} of them used by a token" if shape.experts else ""
    kind = f"{shape.quantization}; the rest {plan.engine_bits}" if shape.quantization else plan.engine_bits
    return [
        f"target       {info.name}: {info.model_type}, {info.num_layers} layers, hidden {info.hidden_size}, "
        f"vocabulary {info.vocab_size:,}",
        f"             {shape.params / 1e9:,.2f} billion values{active}; {shape.num_bytes / GIB:,.1f} GiB as {kind}",
        f"draft        {trained_params(draft) / 1e6:,.1f} million values trained, {export_params(draft) / 1e6:,.1f} "
        f"exported; vocabulary {draft.draft_vocab_size:,}; reads the outputs of layers "
        f"{', '.join(map(str, plan.layers.aux))}",
    ]


def _device(device: Device) -> list[str]:
    size = "" if device.memory_bytes is None else f" ({device.memory_bytes / GIB:,.1f} GiB)"
    lines = [f"{device.name}{size}"]
    for budget in device.budgets:
        lines.append("  " + _verdict(budget))
        for item in budget.items:
            mark, detail = "~" if item.estimated else " ", f"  {item.detail}" if item.detail else ""
            lines.append(f"    {item.name:{_NAME_WIDTH}}{mark}{item.num_bytes / GIB:8.2f} GiB{detail}")
        if not budget.fits:
            lines += [f"    -> {remedy}" for remedy in budget.remedies]
    return [*lines, ""]


def _verdict(budget: Budget) -> str:
    needs = f"{budget.name}: {budget.used_bytes / GIB:,.1f} GiB"
    if budget.num_bytes is None:
        return f"{needs} (not checked: --plan.host_memory_gib)" if budget.name == "everything" else needs
    return f"{needs} of {budget.num_bytes / GIB:,.1f}: {'fits' if budget.fits else 'DOES NOT FIT'}"


def _brief(plan: Plan, budget: Budget) -> str:
    size, verdict = f"{budget.used_bytes / GIB:,.1f} GiB", "" if budget.fits else ", DOES NOT FIT"
    if budget.name.startswith("vLLM"):
        weights, cache = budget.items[0].num_bytes / GIB, budget.items[-1].num_bytes / GIB
        tokens = f"{plan.cache.num_tokens:,.0f} tokens"
        return f"vLLM {size} (weights {weights:,.1f}, KV cache {cache:,.1f} for {tokens}){verdict}"
    of = "" if budget.num_bytes is None or budget.name == "everything" else f" of {budget.num_bytes / GIB:,.1f}"
    return f"{'' if budget.name == 'everything' else budget.name + ' '}{size.removesuffix(' GiB')}{of} GiB{verdict}"


def _who(plan: Plan) -> str:
    """Does which work."""
    if plan.on_cpu:
        return "the CPU does both"
    return "one GPU does both in turn" if plan.shared else "each side has its own GPU"


def _speed(plan: Plan) -> list[str]:
    lengths = plan.lengths
    sample = f"a sample of {lengths.prompt:,.0f} + {lengths.answer:,.0f} tokens" + (
        " (assumed)" if plan.assumed else ""
    )
    if plan.rates is None or plan.producer is None or plan.trainer is None:
        return [
            f"speed        {sample}: no estimate without the rates of this CPU; give --plan.matrix_tflops and "
            "--plan.bandwidth_gb_s, of all the cores that the run may use"
        ]
    producer, trainer, per_s = plan.producer, plan.trainer, plan.tokens_per_s
    assert per_s is not None
    lines = [
        f"rates        {plan.rates.source}"
        + ("; which share of them a CPU reaches was not measured, an H200's is taken" if plan.on_cpu else ""),
        f"producer     {producer.flops_per_token / 1e9:,.1f} GFLOP a prompt token; alone "
        f"{producer.prefill_tokens_per_s:,.0f} prompt and {producer.decode_tokens_per_s:,.0f} answer tokens/s with "
        f"{producer.concurrency:,.0f} requests ({producer.limited_by})",
        f"trainer      {trainer.flops_per_token / 1e9:,.2f} GFLOP a token; alone {trainer.tokens_per_s:,.0f} tokens/s",
        f"together     {per_s:,.0f} tokens/s trained on, with {sample}; " + _who(plan),
    ]
    if plan.launch_bound:
        return [
            *lines,
            "time         steps this short are bound by kernel launches and Python, which a roofline leaves out: "
            "expect a fraction of these speeds",
        ]
    if plan.tokens is None:
        return [*lines, "time         trainer.max_steps is not given"]
    seconds = plan.tokens / per_s
    samples = math.ceil(plan.tokens / lengths.slots)
    took = f"{seconds / 3600:,.1f} hours" if seconds >= 5400 else f"{seconds / 60:,.0f} minutes"
    return [
        *lines,
        f"time         {took} for {plan.tokens / 1e6:,.1f} million tokens ({samples:,} samples), start-up left out",
    ]
