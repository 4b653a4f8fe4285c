"""What is supervised, to be seen: samples decoded, the supervised tokens marked, and the first slot that is trained."""

import html
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from rich.console import Console
from rich.text import Text

from eagle3_lightning.batch import Eagle3Batch
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.requests import RequestStream
from eagle3_lightning.prompts.spans import Spans
from eagle3_lightning.stream.files import runs
from eagle3_lightning.stream.messages import Dropped

_SUPERVISED, _FIRST, _PLAIN = "bold green", "bold reverse green", "dim"
_ANSWER_COMES = "[the target's answer comes here and is supervised]"
COLUMNS = ["sample", "tokens", "supervised", "text"]


@dataclass(frozen=True)
class Piece:
    """Consecutive tokens of one kind.

    Attributes:
        text: decoded, special tokens included.
        supervised: whether the draft learns to propose what follows them.
        first: whether it is the token of the first supervised slot; what the draft proposes there is the next one.
    """

    text: str
    supervised: bool
    first: bool = False


@dataclass(frozen=True)
class Preview:
    """One sample.

    Attributes:
        name: what the data set calls it.
        num_tokens: all of its tokens.
        num_supervised: those that are supervised.
        pieces: the text.
        problem: why it is not trained on; empty if it is.
    """

    name: str
    num_tokens: int
    num_supervised: int
    pieces: list[Piece]
    problem: str = ""


def preview_requests(stream: RequestStream, number: int) -> list[Preview]:
    """The first samples of a stream as vLLM would be given them; in generate mode the answers are still to come."""
    previews = []
    for request in stream.requests(0, number):
        if isinstance(request, Dropped):
            previews.append(Preview(request.name, 0, 0, [], f"{request.reason}: {request.detail}"))
            continue
        pieces = list(_pieces(stream.chat, request.prompt_ids, request.spans))
        if request.max_new_tokens:
            pieces.append(Piece(_ANSWER_COMES, supervised=True, first=True))
        num_supervised = sum(end - start for start, end in request.spans)
        previews.append(Preview(request.name, len(request.prompt_ids), num_supervised, pieces))
    return previews


def preview_batch(batch: Eagle3Batch, chat: ChatTokenizer) -> list[Preview]:
    """The documents of a batch as they are trained on, answers included; the first token of each has no slot."""
    previews = []
    for number, index in enumerate(batch.sample_ids):
        here = batch.doc == number
        ids, mask = batch.ids[here].tolist(), batch.mask[here]
        pieces = list(_pieces(chat, ids, runs(mask.numpy())))
        previews.append(Preview(f"sample {index}", len(ids) + 1, int(mask.sum()), pieces))
    return previews


def print_previews(previews: Iterable[Preview], console: Console) -> None:
    """Write to a terminal: green is supervised, reversed is the first supervised slot."""
    for preview in previews:
        title = f"{preview.name}: {preview.num_tokens} tokens, {preview.num_supervised} supervised"
        console.rule(Text(title), align="left")
        if preview.problem:
            console.print(Text(preview.problem, style="red"))
            continue
        text = Text()
        for piece in preview.pieces:
            text.append(piece.text, style=_FIRST if piece.first else _SUPERVISED if piece.supervised else _PLAIN)
        console.print(text, soft_wrap=True)


def to_html(previews: Sequence[Preview]) -> str:
    """A page of its own with the same marks."""
    bodies = []
    for preview in previews:
        title = html.escape(f"{preview.name}: {preview.num_tokens} tokens, {preview.num_supervised} supervised")
        content = _marked(preview) if not preview.problem else f"<b>{html.escape(preview.problem)}</b>"
        bodies.append(f"<h2>{title}</h2>\n<pre>{content}</pre>")
    return (
        "<!doctype html><meta charset='utf-8'><title>Supervised tokens</title>\n"
        "<style>body{font:14px sans-serif;margin:2em} pre{white-space:pre-wrap;color:#777}"
        " mark{background:#c8f0c8;color:#000} mark.first{background:#3a3;color:#fff}</style>\n"
        "<p>Marked tokens are supervised; the dark one is the token of the first supervised slot.</p>\n"
        + "\n".join(bodies)
        + "\n"
    )


def to_table(previews: Sequence[Preview]) -> list[list[str | int]]:
    """Rows under COLUMNS, for a logger: the supervised text stands in « »."""
    rows: list[list[str | int]] = []
    for preview in previews:
        text = "".join(f"«{piece.text}»" if piece.supervised else piece.text for piece in preview.pieces)
        shown = preview.problem or text.replace("»«", "")
        rows.append([preview.name, preview.num_tokens, preview.num_supervised, shown])
    return rows


def _pieces(chat: ChatTokenizer, ids: list[int], spans: Spans) -> Iterator[Piece]:
    """Decoded runs. The first supervised token stands alone; a token that is no whole character joins its run."""
    marks = [False] * len(ids)
    for start, end in spans:
        marks[start:end] = [True] * (end - start)
    first = spans[0][0] if spans else -1
    tokens = [(token, mark, number == first) for number, (token, mark) in enumerate(zip(ids, marks, strict=True))]
    for (mark, is_first), run in groupby(tokens, key=lambda t: t[1:]):
        yield Piece(chat.decode([token for token, *_ in run]), mark, is_first)


def _marked(preview: Preview) -> str:
    parts = []
    for piece in preview.pieces:
        text = html.escape(piece.text)
        kind = " class='first'" if piece.first else ""
        parts.append(f"<mark{kind}>{text}</mark>" if piece.supervised else text)
    return "".join(parts)
