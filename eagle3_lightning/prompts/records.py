"""One line of a data set becomes one `Record`: messages, plain text or token ids, whatever format it came in.

Recognized by its keys, in this order:

    ids | input_ids | token_ids       token ids, optionally `loss_mask` (one 0 or 1 per id)
    messages                          OpenAI: role and content, tool calls, reasoning; optionally `tools`
    conversations                     ShareGPT: from and value
    prompt, optionally response       a string (one user turn) or a list of messages
    text                              plain text, used as it is and without a chat template

Messages leave in the shape that vLLM's chat endpoint gives to a chat template, so that a prompt that is trained on is
the prompt that is served.
"""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle3_lightning.stream.messages import DropReason

_ID_KEYS = ("ids", "input_ids", "token_ids")
_FORMAT_KEYS = (*_ID_KEYS, "messages", "conversations", "prompt", "text")
_RESPONSE_KEYS = ("response", "completion")
_NAME_KEYS = ("id", "uuid", "conversation_id", "prompt_id")
_SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function": "tool",
}

Message = dict[str, Any]


class RecordError(ValueError):
    """This record cannot be used; the message names the file, the line and the key."""

    def __init__(self, where: str, problem: str, reason: DropReason = "bad_record") -> None:
        self.where, self.problem, self.reason = where, problem, reason
        super().__init__(f"{where}: {problem}")


def name_faults(faults: Iterable[str]) -> str:
    """Texts of RecordErrors in one line, those with the same problem told once."""
    by_problem: dict[str, list[str]] = {}
    for fault in faults:
        where, _, problem = fault.partition(": ")
        by_problem.setdefault(problem, []).append(where)
    parts = []
    for problem, (first, *others) in by_problem.items():
        also = ", ".join(where.rpartition("/")[2] for where in others)
        parts.append(f"{first}: {problem}" + (f" (and {also})" if also else ""))
    return "; ".join(parts)


@dataclass(frozen=True)
class Record:
    """One sample of a data set. Exactly one of `messages`, `text` and `ids` is set.

    Attributes:
        name: the sample's own id, or its file and line.
        where: file and line, for messages.
        messages: a conversation, as a chat template takes it.
        tools: tool schemas that the template shows to the model.
        text: plain text.
        ids: token ids of the target's tokenizer.
        loss_mask: for `ids`: which of them are supervised; None is all of them.
        template_kwargs: of this sample, over those of the run.
    """

    name: str
    where: str
    messages: list[Message] | None = None
    tools: list[dict[str, Any]] | None = None
    text: str | None = None
    ids: list[int] | None = None
    loss_mask: list[bool] | None = None
    template_kwargs: dict[str, Any] = field(default_factory=dict)


def parse_record(raw: object, where: str, fields: Mapping[str, str] | None = None) -> Record:
    """Recognize the format of a decoded line and bring it into a `Record`.

    Args:
        raw: what JSON gave.
        where: file and line.
        fields: our key -> the data set's key, where they differ, for example {"messages": "dialog"}.

    Raises:
        RecordError: not an object, no known key, a value of the wrong kind, or a prompt without a word.
    """
    if not isinstance(raw, dict):
        raise RecordError(where, f"expected a JSON object and found {type(raw).__name__}")
    record = {**raw, **{ours: raw[theirs] for ours, theirs in (fields or {}).items() if theirs in raw}}
    name = next((str(record[key]) for key in _NAME_KEYS if isinstance(record.get(key), str | int)), where)
    kind = next((key for key in _FORMAT_KEYS if record.get(key) is not None), None)
    if kind is None:
        raise RecordError(
            where,
            f"it has none of the keys {', '.join(_FORMAT_KEYS)} (it has {_short(list(raw))}); "
            "say which key is which with the source's `fields`",
        )
    if kind in _ID_KEYS:
        ids = _token_ids(record[kind], where, kind)
        return Record(name, where, ids=ids, loss_mask=_loss_mask(record.get("loss_mask"), len(ids), where))
    if kind == "text":
        text = _string(record["text"], where, "text")
        if not text.strip():
            raise RecordError(where, "`text` is empty")
        return Record(name, where, text=text)
    kwargs = record.get("chat_template_kwargs") or {}
    if not isinstance(kwargs, dict):
        raise RecordError(where, f"`chat_template_kwargs` must be an object and is {_short(kwargs)}")
    messages = [_message(m, f"{where}, {kind}[{i}]") for i, m in enumerate(_turns(record, kind, where))]
    asked = [message["content"] for message in messages if message["role"] == "user"]
    if asked and not any(content.strip() for content in asked):
        raise RecordError(where, f"`{kind}` asks for nothing: what the user says is empty")
    return Record(name, where, messages=messages, tools=_tools(record.get("tools"), where), template_kwargs=kwargs)


def _turns(record: dict[str, Any], kind: str, where: str) -> list[Any]:
    """The raw messages of the three chat formats, in OpenAI's keys."""
    value = record[kind]
    if kind == "prompt":
        turns = [{"role": "user", "content": value}] if isinstance(value, str) else value
        answer = next((record[key] for key in _RESPONSE_KEYS if record.get(key) is not None), None)
        if isinstance(turns, list) and answer is not None:
            turns = turns + (answer if isinstance(answer, list) else [{"role": "assistant", "content": answer}])
    elif kind == "conversations":
        turns = (
            [_from_sharegpt(t, f"{where}, {kind}[{i}]") for i, t in enumerate(value)]
            if isinstance(value, list)
            else value
        )
        if isinstance(turns, list) and turns and isinstance(system := record.get("system"), str) and system:
            turns = [{"role": "system", "content": system}, *turns]
    else:
        turns = value
    if not isinstance(turns, list):
        raise RecordError(where, f"`{kind}` must be a list of messages and is {_short(value)}")
    if not turns:
        raise RecordError(where, f"`{kind}` is empty")
    return turns


def _from_sharegpt(turn: Any, where: str) -> Any:
    if not isinstance(turn, dict) or "from" not in turn:
        return turn  # some ShareGPT files hold OpenAI messages under `conversations`
    role = _SHAREGPT_ROLES.get(str(turn["from"]))
    if role is None:
        raise RecordError(where, f"`from` is {_short(turn['from'])}, which is none of {', '.join(_SHAREGPT_ROLES)}")
    return {"role": role, "content": turn.get("value")}


def _message(turn: Any, where: str) -> Message:
    """One OpenAI message as vLLM hands it to the template: text, parsed tool arguments, reasoning under both names."""
    if not isinstance(turn, dict) or not isinstance(turn.get("role"), str):
        raise RecordError(where, f"expected a message with `role` and `content` and found {_short(turn)}")
    message: Message = {"role": turn["role"]}
    calls = turn.get("tool_calls")
    if turn["role"] == "assistant" and calls:
        message["tool_calls"] = [_tool_call(call, where) for call in calls] if isinstance(calls, list) else calls
        if not isinstance(calls, list):
            raise RecordError(where, f"`tool_calls` must be a list and is {_short(calls)}")
    content = turn.get("content")
    if content is None and "tool_calls" not in message:
        raise RecordError(where, "`content` is missing")
    message["content"] = _text_of(content, where)
    for key in ("name", "tool_call_id"):
        if isinstance(turn.get(key), str):
            message[key] = turn[key]
    reasoning = turn.get("reasoning", turn.get("reasoning_content"))
    if turn["role"] == "assistant" and reasoning is not None:
        message["reasoning"] = message["reasoning_content"] = _string(reasoning, where, "reasoning")
    return message


def _text_of(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return _string(content, where, "content")
    if isinstance(content, list) and all(isinstance(p, dict) and isinstance(p.get("text"), str) for p in content):
        return "\n".join(_string(part["text"], where, "content") for part in content)
    raise RecordError(where, f"`content` must be text and is {_short(content)} (images and audio are not supported)")


def _tool_call(call: Any, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise RecordError(where, f"a tool call needs `function` with a `name`, and one is {_short(call)}")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise RecordError(
                where, f"the arguments of the call to {function['name']} are not JSON ({error})"
            ) from error
    if not isinstance(arguments, dict):
        raise RecordError(where, f"the arguments of the call to {function['name']} are not an object")
    return {**call, "type": "function", "function": {**function, "arguments": arguments}}


def _tools(tools: Any, where: str) -> list[dict[str, Any]] | None:
    if isinstance(tools, str) and tools:  # data sets in Arrow keep nested schemas as a JSON string
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise RecordError(where, f"`tools` is not JSON ({error})") from error
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise RecordError(where, f"`tools` must be a list of objects and is {_short(tools)}")
    return tools


def _token_ids(value: Any, where: str, key: str) -> list[int]:
    if not isinstance(value, list) or not value or not all(type(i) is int and i >= 0 for i in value):
        raise RecordError(where, f"`{key}` must be a list of token ids and is {_short(value)}")
    return value


def _loss_mask(value: Any, length: int, where: str) -> list[bool] | None:
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != length or not all(v in (0, 1) for v in value):
        raise RecordError(
            where, f"`loss_mask` must hold {length} zeros and ones, one per token id, and is {_short(value)}"
        )
    return [bool(v) for v in value]


def _string(value: Any, where: str, key: str) -> str:
    """Text that a tokenizer can take: a str without lone surrogates (JSON allows them, UTF-8 does not)."""
    if not isinstance(value, str):
        raise RecordError(where, f"`{key}` must be text and is {_short(value)}")
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise RecordError(
                where,
                f"`{key}` holds a lone surrogate U+{ord(value[error.start]):04X} at character "
                f"{error.start}, which is not Unicode text",
            ) from error
    return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
