"""Which characters of a rendered conversation the assistant said, for any chat template.

No template is taken apart here and no marker of a model is known. The template is asked instead: a message is replaced
by a word that occurs nowhere else (the probe), and what stands before and after it in the rendering is template.

A turn starts where the rendering of the messages before it, with the generation prompt, ends: that is what vLLM would
have been given. If the whole does not begin so (Mistral moves the system prompt to the last user turn, so that an
earlier one loses it), the start is found behind the message before the turn, in the same words. If that fails too (a
generation prompt that opens a thinking block which the template then drops from the history), the turn starts where a
probe in its place would: what the template dropped is not supervised, because it is not there.

A turn ends with its own text, and with what the template puts behind it whether the turn is the last one or not, up to
the last special token of that: the end-of-turn token which the model itself makes.

A template whose rendering cannot be explained so is refused.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from eagle3_lightning.prompts.records import Message, RecordError

Render = Callable[[list[Message], bool], str]  # messages, add_generation_prompt -> text
Spans = list[tuple[int, int]]

# Plain ASCII, so that no template escapes, trims or splits it; long enough not to occur in a conversation.
PROBE = "Xq7probeZk3answerWv9"


class _Around(NamedTuple):
    head: str  # of the rendering, before the probe
    tail: str  # behind it


class MarkedText(NamedTuple):
    """A rendered conversation.

    Attributes:
        text: all of it.
        spans: [start, end) characters of the assistant's turns, end-of-turn tokens included.
        as_served: whether the last turn stands behind exactly what vLLM would have been given to answer.
    """

    text: str
    spans: Spans
    as_served: bool


def assistant_spans(render: Render, messages: list[Message], specials: list[str], where: str) -> MarkedText:
    """Render a conversation and find its assistant turns.

    Args:
        render: the chat template. It raises RecordError for a conversation that it refuses.
        messages: the conversation.
        specials: texts of the tokenizer's special tokens.
        where: file and line, for messages.

    Raises:
        RecordError: the template refuses the conversation, or renders it so that a turn cannot be located.
    """
    whole = render(messages, False)
    spans: Spans = []
    as_served = False
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        start, as_served = _start(render, messages, index, whole)
        end = _end(render, messages, index, whole, specials)
        if start is None or end is None or start > end or (spans and start < spans[-1][1]):
            raise RecordError(
                where,
                f"the chat template renders messages[{index}] so that its tokens cannot be told from the rest (its "
                "text is changed or left out, or changes what is around it); use generate mode, which needs no mask",
            )
        if end > start:
            spans.append((start, end))
    return MarkedText(whole, spans, as_served)


def _start(render: Render, messages: list[Message], index: int, whole: str) -> tuple[int | None, bool]:
    served = _try(render, messages[:index], True) if index else None
    if served and whole.startswith(served):
        return len(served), True
    if index and messages[index - 1]["role"] != "assistant":
        probe = {**messages[index - 1], "content": PROBE}
        there = _around(render, messages, index - 1, probe)
        before = _around(render, messages[:index], index - 1, probe, add_generation_prompt=True)
        if there and before and whole.endswith(there.tail) and there.tail.startswith(before.tail):
            return len(whole) - len(there.tail) + len(before.tail), False
    own = _around(render, messages, index, {"role": "assistant", "content": PROBE})
    return (len(own.head) if own and whole.startswith(own.head) else None), False


def _end(render: Render, messages: list[Message], index: int, whole: str, specials: list[str]) -> int | None:
    for probe, exact in _replacements(messages[index]):
        there = _around(render, messages, index, probe)
        last = _around(render, messages[: index + 1], index, probe)
        if there is None or last is None:
            continue
        # Behind a probe among the arguments of a call stands the rest of the call, in which quotes may differ.
        differs = 0 if exact else len(there.tail) - len(_common_start(there.tail[::-1], whole[::-1]))
        tail = there.tail[differs:]
        if tail and whole.endswith(tail):
            return len(whole) - len(tail) + _end_of_turn(_common_start(tail, last.tail[differs:]), specials)
        if not there.tail and not last.tail:
            return len(whole)
    return None


def _replacements(message: Message) -> Iterator[tuple[Message, bool]]:
    """The turn in other words, and whether all that follows is then the same.

    First as plain text. A template may name the call in the tool's answer, so that a turn must stay a call: then only
    the last argument changes.
    """
    yield {"role": "assistant", "content": PROBE}, True
    if calls := message.get("tool_calls"):
        function = calls[-1]["function"]
        arguments = dict(function["arguments"])
        arguments[next(reversed(arguments), "argument")] = PROBE
        last = {**calls[-1], "function": {**function, "arguments": arguments}}
        yield {**message, "tool_calls": [*calls[:-1], last]}, False


def _around(
    render: Render, messages: list[Message], index: int, probe: Message, add_generation_prompt: bool = False
) -> _Around | None:
    """What stands around the probe in the place of messages[index]; None if it does not come out exactly once."""
    text = _try(render, [*messages[:index], probe, *messages[index + 1 :]], add_generation_prompt)
    if text is None or text.count(PROBE) != 1:
        return None
    head, _, tail = text.partition(PROBE)
    return _Around(head, tail)


def _try(render: Render, messages: list[Message], add_generation_prompt: bool) -> str | None:
    try:
        return render(messages, add_generation_prompt)
    except RecordError:  # such as a template that insists on an answer to every call
        return None


def _common_start(a: str, b: str) -> str:
    return a[: next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


def _end_of_turn(tail: str, specials: list[str]) -> int:
    """Length of `tail` up to and including its last special token; 0 if it has none."""
    return max((at + len(special) for special in specials if (at := tail.rfind(special)) >= 0), default=0)
