"""The prompts of a bench, rendered as training renders them."""

from pathlib import Path
from typing import Any

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.options import SourceOptions
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.records import RecordError
from eagle3_lightning.prompts.sources import check_faults, open_source
from eagle3_lightning.prompts.tables import StreamSource
from eagle3_lightning.target import TargetInfo

OPTION = "--prompts"


def render_prompts(
    file: Path,
    target: TargetInfo,
    *,
    template_kwargs: dict[str, Any],
    trust_remote_code: bool,
    longest_tokens: int,
    max_prompts: int | None,
) -> list[list[int]]:
    """Token ids of each prompt of a file, its last answer (if it has one) left out.

    Args:
        file: prompts in any format that training reads.
        target: whose tokenizer and chat template are used.
        template_kwargs: passed to the chat template.
        trust_remote_code: let the checkpoint's tokenizer bring code.
        longest_tokens: longest prompt that leaves room for the answer.
        max_prompts: take only the first so many.

    Raises:
        ConfigError: no such file, nothing in it, a line that cannot be used, or a prompt that is too long.
    """
    source = open_source(SourceOptions(str(file)), OPTION)
    assert not isinstance(source, StreamSource)
    check_faults([source], OPTION, max_share=0.0, of_a_run=False)
    tokenizer = ChatTokenizer(target, template_kwargs, trust_remote_code)
    prompts = []
    for row in range(len(source) if max_prompts is None else min(len(source), max_prompts)):
        try:
            record = source.read(row)
            ids = tokenizer.prompt(record)
        except RecordError as error:
            raise ConfigError(OPTION, str(file), str(error), "Repair or remove the line.") from error
        if len(ids) > longest_tokens:
            raise ConfigError(
                OPTION,
                str(file),
                f"{record.where}: {len(ids)} tokens, and at most {longest_tokens} leave room for the answer",
                "Remove the line, or lower --max-new-tokens.",
            )
        prompts.append(ids)
    return prompts
