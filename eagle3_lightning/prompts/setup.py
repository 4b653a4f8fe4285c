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
from eagle3_lightning.prompts.sources import AnySource, as_sources, check_faults, open_source, split_by_hash
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
    splits = not val and prompts.val_fraction > 0
    keep = split_by_hash(prompts.val_fraction, val=False) if splits else None

    def stream(kind: Stream, option: str, options: list[SourceOptions], sources: list[AnySource], seed: int) -> None:
        check_faults(sources, option, queue.max_dropped_share)
        weights = source_weights(options, sources, option)
        made = RequestStream(kind, sources, weights, chat, sampling, engine.max_model_len, batch.pack_tokens, seed)
        made.check(option)
        streams[kind] = made

    streams: dict[Stream, RequestStream] = {}
    stream("train", TRAIN, train, [open_source(source, TRAIN, keep, seed) for source in train], seed)
    if splits:
        keep = split_by_hash(prompts.val_fraction, val=True)
        held_out = [(source, open_source(source, TRAIN, keep, VAL_SEED)) for source in train]
    else:
        held_out = [(source, open_source(source, VAL, None, VAL_SEED)) for source in val]
    held_out = [(options, source) for options, source in held_out if isinstance(source, StreamSource) or len(source)]
    if prompts.max_val_samples > 0 and held_out:
        options, sources = map(list, zip(*held_out, strict=True))
        stream("val", VAL if val else TRAIN, options, sources, VAL_SEED)
    return streams


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
