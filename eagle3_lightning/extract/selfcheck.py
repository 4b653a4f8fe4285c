"""The start-up proof that what is captured is what the draft must see. A failed check stops the run.

Three things are proven on a few prompts of random tokens, in the very engine that will serve the run, compiled or not:
rows: the states of every token are there once, beside the id that was fed, and finite, in generate and prefill mode;
last state: the target's lm_head on it gives vLLM's own log-probabilities, so it is the last layer's, normed once;
auxiliary states: changing the last norm inside layer i changes the state that is taken for the output of layer i, and
changing the norms of layer i + 1 does not. Only what comes out of layer i itself passes both.
"""

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from eagle3_lightning.errors import ProducerError
from eagle3_lightning.extract.engine import Finished, VllmEngine
from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.messages import Sample, Submit
from eagle3_lightning.stream.sample import find_fault
from eagle3_lightning.target import TargetInfo, load_lm_head

PROMPT_TOKENS = (3, 17, 40)  # below, at and above the usual sizes of a KV block
ANSWER_TOKENS = 12
BLOCK_TOKENS = 16
BLOCKS_EACH = -(-(max(PROMPT_TOKENS) + ANSWER_TOKENS) // BLOCK_TOKENS)
LANDING_TIMEOUT_S = 30.0
_VOCAB_CHUNK = 8192
# Largest mean difference in log-probability between lm_head on the captured last state and vLLM's own that may pass for
# rounding. docs/vllm.md has what was measured: rounding, and what a wrong layer or norm gives.
LOGPROB_TOLERANCE = {"float32": 1e-3, "float16": 0.05, "bfloat16": 0.1}
# A state has changed if it moved by more than this share of its norm, and by more than five times what it moves between
# two equal runs (nothing on most engines; some kernels of mixtures of experts add in any order).
CHANGE_THRESHOLD = 1e-4
NOISE_FACTOR = 5.0


@dataclass
class CheckedSample:
    """A sample of the self-check.

    Attributes:
        token_ids: prompt and answer.
        rows: [S, L, H] captured states.
        logprobs: vLLM's own of token i + 1, for i from 0.
    """

    token_ids: list[int]
    rows: Float[Tensor, "S L H"]
    logprobs: list[float]


class SelfCheck:
    """The proof, on a small arena of its own. `run` does all of it."""

    def __init__(self, engine: VllmEngine, info: TargetInfo) -> None:
        """Prepare.

        Args:
            engine: started, no request running. Its arena is another one afterwards.
            info: the target.
        """
        self._engine = engine
        self._info = info
        self._aux = engine.settings.aux_layers
        self._serial = 0

    def run(self) -> list[str]:
        """Prove rows, last state and auxiliary states.

        Returns:
            What was found, for the log.

        Raises:
            ProducerError: the captured states are not those that were asked for; says which looks wrong.
        """
        num_tokens = len(PROMPT_TOKENS) * BLOCKS_EACH * BLOCK_TOKENS
        num_layers, dtype = len(self._aux) + 1, self._engine.settings.dtype
        self._arena = Arena.create(num_tokens, BLOCK_TOKENS, num_layers, self._info.hidden_size, dtype)
        try:
            self._engine.attach(self._arena.path, self._arena.layout)
            generator = torch.Generator().manual_seed(0)
            prompts = [torch.randint(self._info.vocab_size, (n,), generator=generator).tolist() for n in PROMPT_TOKENS]
            answered = self._make(prompts, ANSWER_TOKENS)
            texts = [sample.token_ids for sample in answered]
            prefilled = self._make(texts, 0)
            worst = self._check_last_state(answered + prefilled)
            self._check_aux_states(texts[-1])
        finally:
            self._arena.close()
        states = ", ".join(map(str, (*self._aux, self._info.num_layers - 1)))
        return [
            f"self-check passed: states are the outputs of layers {states}, log-probabilities "
            f"within {worst:.2g} of vLLM's own"
        ]

    def _make(self, prompts: Sequence[list[int]], max_new_tokens: int) -> list[CheckedSample]:
        submits = {}
        for i, prompt in enumerate(prompts):
            self._serial -= 1  # below zero, where the hub has none
            blocks = list(range(i * BLOCKS_EACH, (i + 1) * BLOCKS_EACH))
            submit = Submit("val", i, f"prompt {i}", prompt, [], max_new_tokens, serial=self._serial, blocks=blocks)
            submits[submit.serial] = submit
            self._engine.submit_with_logprobs(submit)
        finished = []
        while self._engine.num_running:
            finished += self._engine.step()
        finished.sort(key=lambda f: -f.serial)
        return [self._checked(submits[f.serial], f) for f in finished]

    def _checked(self, submit: Submit, finished: Finished) -> CheckedSample:
        prompt, generated = submit.prompt_ids, submit.max_new_tokens > 0
        token_ids = prompt + finished.answer_ids if generated else prompt
        num_rows = len(token_ids) - 1 if generated else len(prompt)
        sample = Sample(
            submit.serial, "val", submit.index, submit.name, token_ids, len(prompt), [], num_rows, submit.blocks, "stop"
        )
        deadline_s = time.monotonic() + LANDING_TIMEOUT_S
        while 0 <= self._arena.num_written(sample.serial, sample.blocks) < num_rows and time.monotonic() < deadline_s:
            time.sleep(0.001)  # on CUDA rows come a moment later than tokens
        if fault := find_fault(sample, self._arena):
            mode = "generate" if generated else "prefill"
            raise ProducerError(f"self-check: {fault[0]} in {mode} mode, prompt of {len(prompt)} tokens: {fault[1]}")
        logprobs = [*(finished.prompt_logprobs or []), *((finished.logprobs or []) if generated else [])]
        if len(logprobs) != len(token_ids) - 1:
            raise ProducerError(f"self-check: vLLM gave {len(logprobs)} log-probabilities of {len(token_ids)} tokens")
        return CheckedSample(token_ids, self._arena.read(submit.blocks, num_rows), logprobs)

    def _check_last_state(self, samples: Sequence[CheckedSample]) -> float:
        tolerance = LOGPROB_TOLERANCE[self._engine.settings.dtype]
        head = load_lm_head(self._info)
        worst = max(logprob_error(sample, head, self._info) for sample in samples)
        if not worst < tolerance:
            raise ProducerError(
                f"self-check: lm_head on the captured last state differs from vLLM's own log-probabilities by "
                f"{worst:.3g} on average, and up to {tolerance} is rounding in {self._engine.settings.dtype}: the last "
                f"state looks wrong, it is not the output of layer {self._info.num_layers - 1} after one final norm"
            )
        return worst

    def _check_aux_states(self, text: list[int]) -> None:
        base = self._states(text)
        noise = relative_change(self._states(text), base)
        threshold = (NOISE_FACTOR * noise).clamp(min=CHANGE_THRESHOLD)
        last = self._info.num_layers - 1
        for place, layer in enumerate((*self._aux, last)):
            if not self._moved_by(layer, text, base, whole_layer=False)[place] > threshold[place]:
                raise ProducerError(
                    f"self-check: the state taken for the output of layer {layer} does not depend on the last norm of "
                    f"that layer: it was captured before it, perhaps at layer {layer - 1}"
                )
            if layer == last:
                continue  # what stands behind the last layer is the final norm, which the log-probabilities prove
            if self._moved_by(layer + 1, text, base, whole_layer=True)[place] > threshold[place]:
                raise ProducerError(
                    f"self-check: the state taken for the output of layer {layer} depends on layer {layer + 1}: it was "
                    "captured behind that one"
                )

    def _moved_by(self, layer: int, text: list[int], base: Tensor, whole_layer: bool) -> Tensor:
        self._engine.call_workers("eagle3_perturb", layer, whole_layer)
        try:
            return relative_change(self._states(text), base)
        finally:
            self._engine.call_workers("eagle3_restore")

    def _states(self, text: list[int]) -> Float[Tensor, "S L H"]:
        return self._make([text], 0)[0].rows.float()


def relative_change(states: Float[Tensor, "S L H"], base: Float[Tensor, "S L H"]) -> Float[Tensor, " L"]:
    """How far each layer's states moved, as a share of their norm: the mean over tokens, so that none rules."""
    return ((states - base).norm(dim=2) / base.norm(dim=2).clamp(min=1e-12)).mean(dim=0)


def logprob_error(sample: CheckedSample, head: Float[Tensor, "V H"], info: TargetInfo) -> float:
    """Mean difference between vLLM's log-probabilities and those of the target's head on the captured last states."""
    count = len(sample.logprobs)
    if not count:
        return math.inf
    states = sample.rows[:count, -1].float()
    logits = torch.cat([states @ rows.float().T for rows in head.split(_VOCAB_CHUNK)], dim=1) * info.logit_scale
    if info.logit_softcap is not None:
        logits = info.logit_softcap * torch.tanh(logits / info.logit_softcap)
    targets = torch.tensor(sample.token_ids[1 : count + 1])[:, None]
    ours = logits.log_softmax(dim=1).gather(1, targets)[:, 0]
    return float((ours - torch.tensor(sample.logprobs)).abs().mean())
