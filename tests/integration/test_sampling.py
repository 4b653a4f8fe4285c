"""Requests that bring a sampling of their own, beside others in one engine."""

import pytest
from extract_support import extractor, random_prompts, read_target
from toy_targets import make_toy

from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.stream.messages import Sampling, Submit

pytestmark = pytest.mark.vllm
NUM_NEW = 24


def test_a_request_is_sampled_as_it_says_and_the_others_as_the_engine_does(tmp_path):
    info = read_target(make_toy("llama", tmp_path / "target"))
    (prompt,) = random_prompts(info, [12])
    with extractor(info, LayerPlan((1, 3, 5), 7), tmp_path, max_num_seqs=8) as (_, queue):

        def answers(stream, samplings):
            queue.feed(stream, (Submit(stream, i, str(i), prompt, [], NUM_NEW, 5, s) for i, s in enumerate(samplings)))
            for sample in iter(lambda: queue.get(stream), None):
                yield sample.token_ids[sample.prompt_tokens :], sample.finish_reason
                sample.release()

        ((greedy, reason),) = answers("val", [None])
        assert (len(greedy), reason) == (NUM_NEW, "length")
        end = next(token for token in greedy[4:] if token not in greedy[:4])
        until = greedy[: greedy.index(end) + 1]
        hot, ends = Sampling(temperature=2.0), Sampling((end,))
        given = [None, ends, hot, hot, Sampling((), 2.0, top_k=1), Sampling((end,), 2.0, 1e-6), None]
        plain, stopped, first, second, best, nucleus, last = answers("train", given)
    assert plain == last == best == (greedy, "length")
    assert stopped == nucleus == (until, "stop")
    assert first[0] != greedy
    assert first[0] != second[0]  # on a CPU not even equal seeds are used
