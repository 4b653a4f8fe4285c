"""From the options to the request streams, with everything checked that the files alone can show."""

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import (
    BatchOptions,
    EngineOptions,
    PromptOptions,
    QueueOptions,
    SamplingOptions,
    SourceOptions,
    TargetOptions,
)
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.requests import RequestStream
from eagle3_lightning.prompts.sources import AnySource, as_sources, check_faults, open_source
from eagle3_lightning.prompts.split import Split
from eagle3_lightning.prompts.tables import StreamSource
from eagle3_lightning.stream.messages import Stream
from eagle3_lightning.target import TargetInfo

TRAIN, VAL = "data.prompts.train", "data.prompts.val"
VAL_SEED = 0  # the held-out samples are the same for every seed of the run, so that their curves compare


def open_prompts(
    target: TargetOptions,
    info: TargetInfo,
    prompts: PromptOptions,
    sampling: SamplingOptions,
    engine: EngineOptions,
    queue: QueueOptions,
    batch: BatchOptions,
    seed: int,
) -> dict[Stream, RequestStream]:
    """Open and check every file of prompts, and load the tokenizer.

    Returns:
        The stream `train`, and `val` if any sample is held out.

    Raises:
        ConfigError: a file that cannot be read or holds too many broken rows, no chat template, or no usable sample.
    """
    train, val = as_sources(prompts.train, TRAIN), as_sources(prompts.val, VAL)
    if not train:
        raise ConfigError(TRAIN, [], "no source is named", "Name at least one file of prompts, or `self`.")
    chat = ChatTokenizer(info, dict(prompts.chat_template_kwargs), target.trust_remote_code)
    split = Split(prompts.val_fraction) if not val and prompts.val_fraction > 0 else None

    def stream(kind: Stream, option: str, options: list[SourceOptions], sources: list[AnySource], seed: int) -> None:
        check_faults(sources, option, queue.max_dropped_share)
        weights = source_weights(options, sources, option)
        made = RequestStream(kind, sources, weights, chat, sampling, engine.max_model_len, batch.pack_tokens, seed)
        made.check(option)
        streams[kind] = made

    def hold_out(held_out: list[tuple[SourceOptions, AnySource]]) -> None:
        some = [(options, source) for options, source in held_out if isinstance(source, StreamSource) or len(source)]
        if prompts.max_val_samples > 0 and some:
            options, sources = map(list, zip(*some, strict=True))
            stream("val", VAL if val else TRAIN, options, sources, VAL_SEED)

    streams: dict[Stream, RequestStream] = {}
    held_out = [] if split is None else _split_off(train, split)
    if split is not None and split.is_widened:
        try:
            hold_out(held_out)
        except ConfigError:  # the one row that it would be cannot be used
            split.narrow()
        held_out = []
    keep = None if split is None else split.trained
    stream("train", TRAIN, train, [open_source(source, TRAIN, keep, seed) for source in train], seed)
    hold_out(held_out or [(source, open_source(source, VAL, None, VAL_SEED)) for source in val])
    return streams


def _split_off(train: list[SourceOptions], split: Split) -> list[tuple[SourceOptions, AnySource]]:
    """The held-out rows of each source; one row in all where none would be, and there are more than a handful."""

    def opened() -> list[tuple[SourceOptions, AnySource]]:
        return [(source, open_source(source, TRAIN, split.held_out, VAL_SEED)) for source in train]

    held_out = opened()
    if any(isinstance(source, StreamSource) or len(source) for _, source in held_out) or not split.widen():
        return held_out
    return opened()


def check_lengths(info: TargetInfo, engine: EngineOptions, sampling: SamplingOptions) -> None:
    """Refuse lengths that no prompt can fit.

    Raises:
        ConfigError: longer than the target takes, or no room for a prompt beside the answer.
    """
    longest = engine.max_model_len
    # Other kinds of scaling stretch the checkpoint's figure; vLLM knows by how much.
    if longest > info.max_position_embeddings and info.rope["rope_type"] in ("default", "llama3"):
        problem = f"the target takes at most {info.max_position_embeddings} tokens"
        raise ConfigError("data.engine.max_model_len", longest, problem, "Lower it.")
    if sampling.mode == "generate" and sampling.max_new_tokens >= longest:
        raise ConfigError(
            "data.sampling.max_new_tokens",
            sampling.max_new_tokens,
            f"no prompt fits beside it into data.engine.max_model_len = {longest}",
            "Lower it, or raise max_model_len.",
        )


def source_weights(options: list[SourceOptions], sources: list[AnySource], option: str) -> list[float] | None:
    """The shares of the sources, None where they follow from the sizes.

    Raises:
        ConfigError: some have a weight and some have none, or a stream, which has no size, stands beside others.
    """
    weights = [source.weight for source in options]
    given = [weight for weight in weights if weight is not None]
    if len(given) == len(weights):
        return given
    bare = options[weights.index(None)].path
    if given:
        raise ConfigError(option, bare, "it has no weight and other sources have one", "Give each source a weight.")
    if len(sources) > 1 and any(isinstance(source, StreamSource) for source in sources):
        raise ConfigError(option, bare, "it is mixed with a stream, whose size nobody knows", "Give each a weight.")
    return None
