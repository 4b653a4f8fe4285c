"""Render conversations with vLLM's own chat renderer, in a process of its own (vLLM patches torch when imported).

    python vllm_render.py < requests.json > token_ids.json

A request is {"target", "messages", "tools", "kwargs"}.
"""

import json
import os
import sys
from typing import Any


def main() -> None:
    """Answer all requests."""
    answers = os.dup(1)
    os.dup2(2, 1)  # vLLM logs to stdout
    from vllm.config import ModelConfig, VllmConfig
    from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionToolsParam
    from vllm.renderers.hf import HfRenderer
    from vllm.renderers.params import ChatParams
    from vllm.tokenizers import get_tokenizer

    renderers: dict[str, Any] = {}
    token_ids = []
    for request in json.load(sys.stdin):
        target = request["target"]
        if target not in renderers:
            config = VllmConfig(model_config=ModelConfig(target, dtype="float32"))
            renderers[target] = HfRenderer(config, get_tokenizer(target))
        kwargs = {"add_generation_prompt": True, **request["kwargs"]}
        if request["tools"]:
            kwargs["tools"] = [ChatCompletionToolsParam(**tool).model_dump() for tool in request["tools"]]
        _, prompt = renderers[target].render_messages(request["messages"], ChatParams(chat_template_kwargs=kwargs))
        ids = prompt.get("prompt_token_ids")
        if ids is None:
            ids = renderers[target].get_tokenizer().encode(prompt["prompt"], add_special_tokens=False)
        token_ids.append(list(ids))
    os.write(answers, json.dumps(token_ids).encode())


if __name__ == "__main__":
    main()
