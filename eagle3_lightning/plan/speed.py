"""How fast producer and trainer can be: counted FLOPs and bytes against measured rates (a roofline)."""

from dataclasses import dataclass

from eagle3_lightning.draft.config import DraftConfig
from eagle3_lightning.plan.flops import Work, flops_done
from eagle3_lightning.plan.shape import TargetShape


@dataclass(frozen=True)
class Rates:
    """What a GPU does, and which share of it the two sides reached where they were measured.

    Attributes:
        matrix_flops: FLOP/s of a large bf16 product.
        bandwidth_bytes: memory bytes a second.
        train_share: of `matrix_flops`, by done FLOPs: 0.71 to 0.81 in docs/training.md, 0.62 at one document of 32,768.
        prefill_share: of `matrix_flops`: 42,300 tokens/s at the 8B shape, prompts of 2,048 (one H200, vLLM 0.25.1).
        decode_step_s: what a decoding step takes beside reading and multiplying, one after the other: 20,500 tokens/s
            at the 8B shape, 256 requests of 64 + 256 tokens (likewise).
        source: where the first two come from.
    """

    matrix_flops: float
    bandwidth_bytes: float
    source: str
    train_share: float = 0.77
    prefill_share: float = 0.82
    decode_step_s: float = 1.4e-3


@dataclass(frozen=True)
class Lengths:
    """Mean tokens of a sample's prompt and answer."""

    prompt: float
    answer: float

    @property
    def slots(self) -> float:
        """Slots that the sample gives."""
        return self.prompt + self.answer - 1


@dataclass(frozen=True)
class Producer:
    """vLLM at work.

    Attributes:
        flops_per_token: forward, of a prompt's token at the mean length.
        prefill_tokens_per_s: prompt tokens alone.
        decode_tokens_per_s: answer tokens alone.
        concurrency: requests at once.
        limited_by: what limits them.
        seconds_per_sample: prompt and answer.
        step_s: one decoding step.
    """

    flops_per_token: float
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    concurrency: float
    limited_by: str
    seconds_per_sample: float
    step_s: float


@dataclass(frozen=True)
class Trainer:
    """The trainer at work, on all its ranks.

    Attributes:
        flops_per_token: of a slot, backward included, as executed.
        tokens_per_s: slots.
        seconds_per_sample: one.
    """

    flops_per_token: float
    tokens_per_s: float
    seconds_per_sample: float


def estimate_producer(
    shape: TargetShape, rates: Rates, lengths: Lengths, tensor_parallel: int, limits: dict[str, float], kv_value: float
) -> Producer:
    """vLLM by the roofline.

    Args:
        shape: of the target.
        rates: of one GPU.
        lengths: of a sample; an answer of 0 is prefill mode.
        tensor_parallel: GPUs that work together.
        limits: requests at once, by what limits them.
        kv_value: bytes of a value in the KV cache.
    """
    name, requests = min(limits.items(), key=lambda item: item[1])
    requests = max(1.0, requests)
    per_token = shape.token_flops(lengths.prompt / 2, decoding=False)
    prefill = tensor_parallel * rates.matrix_flops * rates.prefill_share / per_token
    context = lengths.prompt + lengths.answer / 2
    multiply_s = requests * shape.token_flops(context, decoding=True) / tensor_parallel / rates.matrix_flops
    cache = requests * context * shape.kv_bytes(tensor_parallel, kv_value)
    read_s = (shape.read_bytes(tensor_parallel, requests) + cache) / rates.bandwidth_bytes
    step_s = multiply_s + read_s + rates.decode_step_s
    decode = requests / step_s
    seconds = lengths.prompt / prefill + lengths.answer / decode
    return Producer(per_token, prefill, decode, requests, name, seconds, step_s)


def estimate_trainer(config: DraftConfig, ttt_steps: int, rates: Rates, lengths: Lengths, ranks: int) -> Trainer:
    """The trainer by its counted FLOPs.

    Args:
        config: of the draft.
        ttt_steps: K.
        rates: of one GPU.
        lengths: of a sample.
        ranks: GPUs that train.
    """
    answer = lengths.answer or lengths.prompt  # prefill mode: all of it, which is the most there can be
    flops = flops_done(config, ttt_steps, Work.of_sample(lengths.slots - answer + 1, answer, ttt_steps))
    seconds = flops / (ranks * rates.matrix_flops * rates.train_share)
    return Trainer(flops / lengths.slots, lengths.slots / seconds, seconds)
