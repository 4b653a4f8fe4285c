"""What crosses between `eagle3 bench` and its vLLM process: a job file in, event lines, a result file out."""

from typing import Any

import msgspec

from eagle3_lightning.stream.messages import Mistake

START_STAGES = ("importing vLLM", "starting vLLM")
DONE = "done"


class Difference(msgspec.Struct, frozen=True):
    """The first place where two greedy outputs of one prompt part.

    Attributes:
        prompt: index of the prompt.
        position: index of the token in the output.
        draft_token: what the target with the draft wrote; -1 where its output had ended.
        plain_token: what the target alone wrote; -1 where its output had ended.
        gap: how far the less likely of the two lies under the target's best token after the same prefix, in nats of
            log-probability: 0 where both are equally good. For the usual case of one of them being the best and the
            other the second best, that is the gap between the target's two best. A token that is not ranked counts as
            the last that is.
        top_tokens: the target's best tokens there, ranked.
    """

    prompt: int
    position: int
    draft_token: int
    plain_token: int
    gap: float
    top_tokens: list[int]


class Outputs(msgspec.Struct, frozen=True):
    """Greedy outputs to compare with, token ids by prompt, and the name of the run that wrote them."""

    name: str
    tokens: list[list[int]]


class Task(msgspec.Struct, frozen=True):
    """Run all prompts of a set once, and judge what other runs made of them.

    Attributes:
        name: of the set.
        prompts: token ids.
        concurrency: requests in flight.
        judge: outputs of other runs, to be compared with this engine's own.
        repeat: run the prompts once more, in the opposite order, and compare with that as well: other batches, and
            nothing else that is different.
    """

    name: str
    prompts: list[list[int]]
    concurrency: int
    judge: list[Outputs] = []
    repeat: bool = False


class EngineJob(msgspec.Struct, frozen=True):
    """Start an engine, do the tasks one after the other, stop.

    Attributes:
        engine: keyword arguments of `vllm.LLM`.
        env: environment variables of the engine.
        tasks: what to run.
        max_new_tokens: longest output.
        result: file for the `EngineResult`.
        parent_pid: the engine ends when this process does.
        extra: those of `engine` that are the user's own: what vLLM says against them is for the user to mend.
    """

    engine: dict[str, Any]
    env: dict[str, str]
    tasks: list[Task]
    max_new_tokens: int
    result: str
    parent_pid: int
    extra: dict[str, Any] = {}


class Pass(msgspec.Struct, frozen=True):
    """What a task gave.

    Attributes:
        concurrency: requests in flight.
        seconds: from the first request to the last token.
        tokens: output token ids by prompt.
        rounds: decoding steps by prompt, without the prefill's own token.
        drafts: rounds in which the draft proposed, by vLLM's counters.
        draft_tokens: tokens proposed.
        accepted_tokens: of these accepted.
        accepted_per_position: accepted at each draft position.
        differences: by name of the other run.
        repeat_differences: of the task's repetition, if there was one.
    """

    concurrency: int
    seconds: float
    tokens: list[list[int]]
    rounds: list[int]
    drafts: int
    draft_tokens: int
    accepted_tokens: int
    accepted_per_position: list[int]
    differences: dict[str, list[Difference]] = {}
    repeat_differences: list[Difference] | None = None

    @property
    def num_tokens(self) -> int:
        """Output tokens of all prompts."""
        return sum(map(len, self.tokens))


class EngineResult(msgspec.Struct, frozen=True):
    """What the engine did.

    Attributes:
        vllm_version: version of vLLM.
        device: `cpu`, or the GPU's name.
        dtype: of the target's weights in the engine.
        start_s: seconds from the process's start to the first request, imports included.
        passes: one a task.
    """

    vllm_version: str
    device: str
    dtype: str
    start_s: float
    passes: list[Pass]


class Progress(msgspec.Struct, frozen=True):
    """One event line: what is being done, and how much of it; or the mistake of the user's that ends it."""

    stage: str
    done: int
    total: int
    mistake: Mistake | None = None
