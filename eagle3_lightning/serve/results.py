"""The figures of `eagle3 bench`: acceptance, speed, losslessness, and what to serve with."""

import random

import msgspec

from eagle3_lightning.serve.messages import Difference, Pass

# Largest distance from the target's best log-probability, in nats, that rounding alone can turn around. The logits of
# a 16-bit engine move by a few units in their last place when the batch changes (8 bits of mantissa: 0.125 between 16
# and 32), and a speculative round is another batch. In float32 the outputs must be identical. On the CPU they are; on
# CUDA vLLM's float32 attention computes in TF32, and 6 of 160 outputs parted, at gaps of 0.0014 to 0.0116 nats.
NEAR_TIE_NATS = {"float32": 0.0, "float16": 0.25, "bfloat16": 0.5}
BOOTSTRAP_DRAWS = 1000
# So many rounds without one accepted token are no longer chance: a draft of SmolLM2 had none accepted in 164 rounds
# after 3 steps of training, and one in 13 rounds after 40.
MIN_ROUNDS = 100


class DraftFigures(msgspec.Struct, frozen=True):
    """One draft, one number of speculative tokens, one set of prompts, one concurrency.

    Attributes:
        prompts: file of the prompts.
        num_prompts: how many of them were run.
        num_speculative_tokens: K, tokens proposed in a round.
        concurrency: requests in flight.
        acceptance_length: 1 + accepted tokens / rounds, from vLLM's counters.
        acceptance_length_ci95: 95 % interval of tokens / rounds, bootstrapped over prompts.
        acceptance_per_position: share of the rounds in which the token at each position was accepted.
        num_drafts: rounds.
        seconds: from the first request to the last token.
        plain_seconds: the same of the target alone.
        tokens_per_s: output tokens a second.
        plain_tokens_per_s: the same of the target alone.
        speedup: their ratio.
        identical: outputs equal to the target's own, token by token.
        differences: the others, at their first difference, the widest gap first.
        real_differences: how many of them are wider than rounding explains.
    """

    prompts: str
    num_prompts: int
    num_speculative_tokens: int
    concurrency: int
    acceptance_length: float
    acceptance_length_ci95: tuple[float, float]
    acceptance_per_position: list[float]
    num_drafts: int
    seconds: float
    plain_seconds: float
    tokens_per_s: float
    plain_tokens_per_s: float
    speedup: float
    identical: int
    differences: list[Difference]
    real_differences: int


class Recommendation(msgspec.Struct, frozen=True):
    """What was fastest at one concurrency; no speculative tokens means that the target alone was."""

    concurrency: int
    num_speculative_tokens: int | None
    speedup: float


class Repeat(msgspec.Struct, frozen=True):
    """The target alone against itself: the same prompts in the opposite order, so in other batches.

    Attributes:
        prompts: file of the prompts.
        concurrency: requests in flight.
        num_prompts: how many of them were run.
        identical: outputs that came out the same, token by token.
        widest_gap: of the others, the widest at a first difference, in nats (see Difference); 0 if there are none.
    """

    prompts: str
    concurrency: int
    num_prompts: int
    identical: int
    widest_gap: float


class BenchReport(msgspec.Struct, frozen=True):
    """Everything that `eagle3 bench --json` prints.

    Attributes:
        draft: directory of the draft.
        target: directory of the target.
        num_prompts: how many prompts were run, all files together.
        max_new_tokens: longest output.
        dtype: of the engine's weights.
        device: `cpu`, or the GPU's name.
        vllm_version: version of vLLM.
        start_s: seconds to start each engine, the target alone last.
        figures: one entry for each number of speculative tokens, concurrency and file of prompts.
        recommended: one entry for each concurrency, all files together.
        lossless: no output differs more than rounding explains.
        never_accepted: each number of speculative tokens with which not one token was accepted in 100 rounds or more,
            so that the draft is served wrongly, or had a few steps of training at most.
        repeats: what rounding did to the target alone, at the highest concurrency, for comparison; it decides nothing.
    """

    draft: str
    target: str
    num_prompts: int
    max_new_tokens: int
    dtype: str
    device: str
    vllm_version: str
    start_s: list[float]
    figures: list[DraftFigures]
    recommended: list[Recommendation]
    lossless: bool
    repeats: list[Repeat] = []
    never_accepted: list[int] = []


def draft_figures(
    num_speculative_tokens: int, prompts: str, drafted: Pass, plain: Pass, differences: list[Difference], dtype: str
) -> DraftFigures:
    """Put the figures of one pass together.

    Args:
        num_speculative_tokens: K.
        prompts: file of the prompts.
        drafted: the pass with the draft.
        plain: the pass of the target alone at the same concurrency.
        differences: first differences between their outputs.
        dtype: of the engine's weights; decides what rounding explains.
    """
    drafts = max(1, drafted.drafts)
    speed, plain_speed = drafted.num_tokens / drafted.seconds, plain.num_tokens / plain.seconds
    return DraftFigures(
        prompts=prompts,
        num_prompts=len(drafted.tokens),
        num_speculative_tokens=num_speculative_tokens,
        concurrency=drafted.concurrency,
        acceptance_length=1 + drafted.accepted_tokens / drafts,
        acceptance_length_ci95=acceptance_interval([len(t) - 1 for t in drafted.tokens], drafted.rounds),
        acceptance_per_position=[accepted / drafts for accepted in drafted.accepted_per_position],
        num_drafts=drafted.drafts,
        seconds=drafted.seconds,
        plain_seconds=plain.seconds,
        tokens_per_s=speed,
        plain_tokens_per_s=plain_speed,
        speedup=speed / plain_speed,
        identical=len(drafted.tokens) - len(differences),
        differences=sorted(differences, key=lambda d: -d.gap),
        real_differences=sum(not is_near_tie(d, dtype) for d in differences),
    )


def repeat_figures(prompts: str, plain: Pass) -> Repeat:
    """What the repetition of a pass of the target alone gave."""
    differences = plain.repeat_differences or []
    widest = max((difference.gap for difference in differences), default=0.0)
    return Repeat(prompts, plain.concurrency, len(plain.tokens), len(plain.tokens) - len(differences), widest)


def is_near_tie(difference: Difference, dtype: str) -> bool:
    """Whether rounding explains a first difference.

    Both tokens must be among the target's best, and the lower of them closer to the best than `NEAR_TIE_NATS`. An
    output that merely ended earlier (token -1) never is: where an output ends, its end-of-sequence token stands.
    """
    written = {difference.draft_token, difference.plain_token}
    return written <= set(difference.top_tokens) and difference.gap < NEAR_TIE_NATS[dtype]


def acceptance_interval(tokens: list[int], rounds: list[int]) -> tuple[float, float]:
    """95 % interval of sum(tokens) / sum(rounds) when the prompts had been others of their kind.

    The rounds of one output are alike, so whole prompts are drawn, not rounds.
    """
    pairs = [(t, r) for t, r in zip(tokens, rounds, strict=True) if r > 0]
    if not pairs:
        return (1.0, 1.0)
    generator = random.Random(0)
    draws = []
    for _ in range(BOOTSTRAP_DRAWS):
        drawn = generator.choices(pairs, k=len(pairs))
        draws.append(sum(t for t, _ in drawn) / sum(r for _, r in drawn))
    draws.sort()
    return draws[int(0.025 * BOOTSTRAP_DRAWS)], draws[int(0.975 * BOOTSTRAP_DRAWS)]


def never_accepted(figures: list[DraftFigures]) -> list[int]:
    """Each number of speculative tokens with which nothing was accepted, in enough rounds to say so."""
    depths = sorted({f.num_speculative_tokens for f in figures})
    by_depth = {depth: [f for f in figures if f.num_speculative_tokens == depth] for depth in depths}
    return [
        depth
        for depth, here in by_depth.items()
        if all(f.acceptance_length == 1 for f in here) and sum(f.num_drafts for f in here) >= MIN_ROUNDS
    ]


def recommend(figures: list[DraftFigures]) -> list[Recommendation]:
    """The fastest number of speculative tokens at each concurrency, or none where the target alone is faster."""
    chosen = []
    for concurrency in sorted({f.concurrency for f in figures}):
        here = [f for f in figures if f.concurrency == concurrency]
        depths = {f.num_speculative_tokens for f in here}
        by_depth = {k: speedup([f for f in here if f.num_speculative_tokens == k]) for k in sorted(depths)}
        best = max(by_depth, key=lambda k: by_depth[k])
        chosen.append(Recommendation(concurrency, best if by_depth[best] > 1 else None, by_depth[best]))
    return chosen


def speedup(figures: list[DraftFigures]) -> float:
    """Tokens a second with the draft over those of the target alone, several files of prompts as one."""
    tokens = sum(f.tokens_per_s * f.seconds for f in figures)
    plain_tokens = sum(f.plain_tokens_per_s * f.plain_seconds for f in figures)
    return tokens / sum(f.seconds for f in figures) / (plain_tokens / sum(f.plain_seconds for f in figures))


def pooled_acceptance(figures: list[DraftFigures]) -> tuple[float, list[float]]:
    """Acceptance length and acceptance by position of all rounds, several files of prompts as one."""
    rounds = max(1, sum(f.num_drafts for f in figures))
    length = 1 + sum((f.acceptance_length - 1) * f.num_drafts for f in figures) / rounds
    by_position = zip(*(f.acceptance_per_position for f in figures), strict=True)
    weights = [f.num_drafts / rounds for f in figures]
    return length, [sum(w * share for w, share in zip(weights, shares, strict=True)) for shares in by_position]
