"""Mean tokens of a sample: as given, checked against what the run lets through, or assumed."""

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.plan.check import longest_sample
from eagle3_lightning.plan.run import PlanOptions, Run
from eagle3_lightning.plan.speed import Lengths

DEFAULT_PROMPT_TOKENS = 256
_LEAST_CONVERSATION = 2  # tokens; the first is never drafted


def read_lengths(run: Run, options: PlanOptions) -> tuple[Lengths, bool]:
    """Of a sample, and whether something of it is assumed.

    Args:
        run: its longest sample, which a mean cannot exceed.
        options: with the means.

    Raises:
        ConfigError: a mean that is over what the run lets through.
    """
    if run.sampling.mode == "prefill":
        return _conversation(run, options)
    answer_room = run.sampling.max_new_tokens
    prompt_room = max(1, longest_sample(run.engine, run.batch) - answer_room)
    _check_room("plan.prompt_tokens", options.prompt_tokens, prompt_room, "a longer prompt is dropped beside "
                f"data.sampling.max_new_tokens = {answer_room}: {_limits(run)}")  # fmt: skip
    _check_room("plan.answer_tokens", options.answer_tokens, answer_room, "an answer ends at "
                f"data.sampling.max_new_tokens = {answer_room}")  # fmt: skip
    prompt = options.prompt_tokens or min(DEFAULT_PROMPT_TOKENS, prompt_room)
    answer = options.answer_tokens or max(1, answer_room // 2)
    return Lengths(float(prompt), float(answer)), None in (options.prompt_tokens, options.answer_tokens)


def _conversation(run: Run, options: PlanOptions) -> tuple[Lengths, bool]:
    """In prefill mode, where answers are part of what is given."""
    if options.answer_tokens is not None:
        raise ConfigError("plan.answer_tokens", options.answer_tokens, "in prefill mode no answer is made",
                          "Leave it out; plan.prompt_tokens is the whole conversation.")  # fmt: skip
    room = min(run.engine.max_model_len - 1, run.batch.pack_tokens + 1)  # vLLM always makes one token
    _check_room("plan.prompt_tokens", options.prompt_tokens, room, f"a longer conversation is dropped: {_limits(run)}")
    if options.prompt_tokens is not None and options.prompt_tokens < _LEAST_CONVERSATION:
        raise ConfigError("plan.prompt_tokens", options.prompt_tokens, "a conversation of one token trains nothing",
                          f"Give at least {_LEAST_CONVERSATION}.")  # fmt: skip
    assumed = max(_LEAST_CONVERSATION, min(run.engine.max_model_len / 2, room))
    return Lengths(float(options.prompt_tokens or assumed), 0.0), options.prompt_tokens is None


def _check_room(option: str, mean: int | None, room: int, why: str) -> None:
    if mean is not None and mean > room:
        raise ConfigError(option, mean, why, f"Give at most {room}.")


def _limits(run: Run) -> str:
    return f"data.engine.max_model_len = {run.engine.max_model_len}, data.batch.pack_tokens = {run.batch.pack_tokens}"
