"""Records to token ids with the target's own tokenizer and template: the text that vLLM's chat endpoint would see."""

import hashlib
import json
import logging
import re
from dataclasses import dataclass
from typing import Any

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.prompts.records import Message, Record, RecordError
from eagle3_lightning.prompts.spans import PROBE, Spans, assistant_spans
from eagle3_lightning.stream.files import runs
from eagle3_lightning.target import TargetInfo

_log = logging.getLogger(__name__)
_TOKENIZER_FILES = (
    "tokenizer.json", "*.model", "*.tiktoken", "vocab.json", "merges.txt", "added_tokens.json",
    "special_tokens_map.json", "tokenization_*.py",
)  # fmt: skip
_TOKENIZER_CONFIG = "tokenizer_config.json"
# Of tokenizer_config.json: the template has a fingerprint of its own, and the others change no id.
_NO_IDS = ("chat_template", "is_local", "local_files_only", "model_max_length", "name_or_path", "transformers_version")
_GENERATION_MARKER = re.compile(r"\{%-?\s*generation\s*-?%\}")


@dataclass(frozen=True)
class UserTurn:
    """What a template puts around the first words of a user.

    Attributes:
        opening: token ids before them.
        stop_ids: tokens of which the template puts one right behind them; none if it puts plain text there.
        closing: that text, its first line; empty where there are `stop_ids` or nothing.
    """

    opening: list[int]
    stop_ids: tuple[int, ...]
    closing: str


class ChatTokenizer:
    """The target's tokenizer. Encodes a prompt for generation, or a whole conversation with its assistant spans.

    Attributes:
        special_ids: ids of the special tokens, ascending.
    """

    def __init__(self, target: TargetInfo, template_kwargs: dict[str, Any], trust_remote_code: bool = False) -> None:
        """Load the tokenizer from the checkpoint.

        Args:
            target: whose tokenizer.
            template_kwargs: for every rendering, for example {"enable_thinking": False}.
            trust_remote_code: let Transformers run the tokenizer's code from the checkpoint.

        Raises:
            ConfigError: the checkpoint has no tokenizer that Transformers can load, or one for more ids than the model.
        """
        from transformers import AutoTokenizer

        try:
            self._tokenizer: Any = AutoTokenizer.from_pretrained(str(target.path), trust_remote_code=trust_remote_code)
        except Exception as error:  # Transformers raises whatever the broken file led to
            raise ConfigError(
                "target.path",
                target.name,
                f"its tokenizer cannot be loaded ({type(error).__name__}: {' '.join(str(error).split())})",
                "Put tokenizer.json and tokenizer_config.json beside the weights.",
            ) from error
        self._target, self._template_kwargs = target, template_kwargs
        specials = {i: str(token) for i, token in self._tokenizer.added_tokens_decoder.items() if token.special}
        self._specials, self.special_ids = sorted(set(specials.values())), tuple(sorted(specials))
        # Some tokenizers do not call all of them special (DeepSeek's for its turns); some add runs of spaces.
        added = {i: str(token) for i, token in self._tokenizer.added_tokens_decoder.items()}
        self._markup = {i: token for i, token in added.items() if token.strip()}
        self._warned = False
        self._marked = bool(_GENERATION_MARKER.search(self.template or ""))

    @property
    def template(self) -> str | None:
        """The chat template for conversations without tools, or None."""
        template = self._tokenizer.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def fingerprint(self) -> dict[str, str]:
        """Of the tokenizer's files and of the chat template with its arguments."""
        digest = hashlib.sha256()
        for file in sorted(p for pattern in _TOKENIZER_FILES for p in self._target.path.glob(pattern)):
            digest.update(file.name.encode() + file.read_bytes())
        if (file := self._target.path / _TOKENIZER_CONFIG).is_file():
            settings = json.loads(file.read_text(encoding="utf-8"))
            kept = {name: value for name, value in settings.items() if name not in _NO_IDS}
            digest.update(json.dumps(kept, sort_keys=True).encode())
        template = json.dumps([self._tokenizer.chat_template, self._template_kwargs], sort_keys=True)
        return {"tokenizer": digest.hexdigest(), "template": hashlib.sha256(template.encode()).hexdigest()}

    def decode(self, ids: list[int]) -> str:
        """Text of token ids, special tokens included."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, nothing added."""
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def user_turn(self) -> UserTurn:
        """What the template puts around the user's words in a conversation that begins with them.

        Raises:
            ConfigError: no chat template, or one that does not show the user's words as they are.
        """
        record = Record("opening", "the opening", messages=[])
        text = self._render(record, [{"role": "user", "content": PROBE}], True)
        opening, found, closing = text.partition(PROBE)
        if not found:
            raise ConfigError("target.path", self._target.name, "its chat template does not show the user's words",
                              "Give prompts of your own.")  # fmt: skip
        closing = closing.strip()
        ends = [i for i, token in self._markup.items() if closing.startswith(token.strip())]
        # A space before the words is a part of their first token in most vocabularies.
        opening_ids = self.encode(opening.rstrip(" "))
        return UserTurn(opening_ids, tuple(ends), "" if ends else closing.partition("\n")[0])

    def has_markup(self, ids: list[int]) -> bool:
        """Whether any id is a token that templates are made of."""
        return not self._markup.keys().isdisjoint(ids)

    def prompt(self, record: Record) -> list[int]:
        """Token ids that vLLM answers: everything up to the last turn that is not the assistant's.

        Raises:
            RecordError: nothing to answer, or the template refuses the conversation.
        """
        if record.messages is None:
            return self._plain(record)
        messages = record.messages
        while messages and messages[-1]["role"] == "assistant":
            messages = messages[:-1]
        if not any(message["role"] == "user" for message in messages):
            raise RecordError(record.where, "the conversation has no user turn to answer")
        return self._checked(self.encode(self._render(record, messages, True)), record)

    def conversation(self, record: Record) -> tuple[list[int], Spans]:
        """Token ids of the whole conversation up to its last assistant turn, and the spans that the assistant said.

        Plain text and token ids without a `loss_mask` are supervised from end to end.

        Raises:
            RecordError: no assistant turn, or the template refuses the conversation or does not let its turns be found.
        """
        if record.messages is None:
            ids = self._plain(record)
            return ids, runs(record.loss_mask) if record.loss_mask is not None else [(0, len(ids))]
        messages = record.messages
        while messages and messages[-1]["role"] != "assistant":
            messages = messages[:-1]
        if not messages:
            raise RecordError(
                record.where, "the conversation has no assistant turn, and prefill mode trains on those", "empty_mask"
            )
        if self._marked:
            ids, spans = self._marked_conversation(record, messages)
        else:
            marked = assistant_spans(
                lambda turns, add: self._render(record, turns, add), messages, self._specials, record.where
            )
            if not marked.as_served:
                self._warn_not_as_served(record)
            ids, spans = self._encode_with_spans(marked.text, marked.spans)
        return self._checked(ids, record), spans

    def _warn_not_as_served(self, record: Record) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "%s: the chat template puts something before this conversation's last answer that it would not put "
                "there when served, or leaves something out (often an empty or an open thinking block). The states are"
                " those of another context than vLLM's; consider generate mode, or other chat_template_kwargs",
                record.where,
            )

    def _plain(self, record: Record) -> list[int]:
        ids = record.ids if record.ids is not None else list(self._tokenizer(record.text)["input_ids"])
        return self._checked(ids, record)

    def _checked(self, ids: list[int], record: Record) -> list[int]:
        if not ids:
            raise RecordError(record.where, "it has no tokens")
        if max(ids) >= self._target.vocab_size:
            raise RecordError(
                record.where, f"token id {max(ids)} is not in the target's vocabulary of {self._target.vocab_size}"
            )
        return ids

    def _template_arguments(self, record: Record) -> dict[str, Any]:
        if self._tokenizer.chat_template is None:
            raise ConfigError(
                "target.path",
                self._target.name,
                "its tokenizer has no chat template and the prompts are conversations",
                "Use the instruct model, add a chat_template.jinja, or give `text` instead of messages.",
            )
        return {**self._template_kwargs, **record.template_kwargs, "tools": record.tools}

    def _render(self, record: Record, messages: list[Message], add_generation_prompt: bool) -> str:
        arguments = self._template_arguments(record)
        try:
            return str(
                self._tokenizer.apply_chat_template(
                    messages, tokenize=False, add_generation_prompt=add_generation_prompt, **arguments
                )
            )
        except Exception as error:  # templates raise on roles out of order, and fail on values that they do not expect
            raise RecordError(record.where, f"the chat template refuses the conversation ({error})") from error

    def _marked_conversation(self, record: Record, messages: list[Message]) -> tuple[list[int], Spans]:
        """For a template that marks the assistant's text itself, with {% generation %}."""
        arguments = self._template_arguments(record)
        try:
            out = self._tokenizer.apply_chat_template(
                messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **arguments
            )
        except Exception as error:
            raise RecordError(record.where, f"the chat template refuses the conversation ({error})") from error
        return list(out["input_ids"]), runs(out["assistant_masks"])

    def _encode_with_spans(self, text: str, chars: Spans) -> tuple[list[int], Spans]:
        """Encode a text; a token is in a span if all its characters are."""
        if not self._tokenizer.is_fast:
            ids = self.encode(text)
            return ids, [
                (self._tokens_before(text, start, ids), self._tokens_before(text, end, ids)) for start, end in chars
            ]
        encoded = self._tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        mask, spans = [False] * len(encoded["input_ids"]), iter(chars)
        start, end = next(spans, (len(text), len(text)))
        for token, (first, stop) in enumerate(encoded["offset_mapping"]):
            while first >= end and end < len(text):
                start, end = next(spans, (len(text), len(text)))
            mask[token] = start <= first < stop <= end
        return list(encoded["input_ids"]), runs(mask)

    def _tokens_before(self, text: str, at: int, ids: list[int]) -> int:
        """Tokens of `text` before character `at`, for tokenizers in Python, which give no offsets."""
        before = self.encode(text[:at])
        return next(
            (i for i, (a, b) in enumerate(zip(before, ids, strict=False)) if a != b), min(len(before), len(ids))
        )
