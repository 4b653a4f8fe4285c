"""The conversations of the golden tests, and what each template is rendered with."""
# ruff: noqa: RUF001 (DeepSeek writes its special tokens with a full-width bar)

from typing import Any

SYSTEM = {"role": "system", "content": "Be brief."}
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather in a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}
CALL = {"id": "call12345", "type": "function", "function": {"name": "get_weather", "arguments": {"city": "Oslo"}}}

CONVERSATIONS: dict[str, dict[str, Any]] = {
    "system": {
        "messages": [SYSTEM, {"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello!"}],
    },
    "multi-turn": {
        "messages": [
            {"role": "user", "content": "One plus one?"},
            {"role": "assistant", "content": "Two."},
            {"role": "user", "content": "Plus one?"},
            {"role": "assistant", "content": "Three.\n\nAnything else?"},
            {"role": "user", "content": "No"},
            {"role": "assistant", "content": "Bye"},
        ]
    },
    "system multi-turn": {
        "messages": [
            SYSTEM,
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": "2"},
            {"role": "user", "content": "Two"},
            {"role": "assistant", "content": "2"},
        ]
    },
    "tools": {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": "Weather in Oslo?"},
            {"role": "assistant", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"celsius": 4}'},
            {"role": "assistant", "content": "It is 4 degrees."},
            {"role": "user", "content": "Thanks"},
            {"role": "assistant", "content": "You're welcome."},
        ],
    },
    "thinking": {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "reasoning_content": "Easy sum.", "content": "4"},
            {"role": "user", "content": "3 + 3?"},
            {"role": "assistant", "reasoning_content": "Again a sum.", "content": "6"},
        ]
    },
    "inline thinking": {
        "messages": [
            {"role": "user", "content": "2 + 2?"},
            {"role": "assistant", "content": "<think>\nEasy sum.\n</think>\n\n4"},
            {"role": "user", "content": "3 + 3?"},
            {"role": "assistant", "content": "<think>\nAgain a sum.\n</think>\n\n6"},
        ]
    },
    "thinking tools": {
        "tools": [WEATHER],
        "messages": [
            {"role": "user", "content": "Weather in Oslo?"},
            {"role": "assistant", "reasoning_content": "I must look.", "content": "", "tool_calls": [CALL]},
            {"role": "tool", "tool_call_id": "call12345", "name": "get_weather", "content": '{"celsius": 4}'},
            {"role": "assistant", "reasoning_content": "Cold.", "content": "It is 4 degrees."},
        ],
    },
}

# Template -> its tokenizer's special tokens, its added tokens that are not special, its names, and its cases
# (conversation, template arguments).
TEMPLATES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "specials": ["<|im_start|>", "<|im_end|>"],
        "names": {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"},
        "cases": [("system", {}), ("multi-turn", {})],
    },
    "marked": {
        "specials": ["<|im_start|>", "<|im_end|>"],
        "names": {"eos_token": "<|im_end|>"},
        "cases": [("system", {}), ("multi-turn", {})],
    },
    "llama3": {
        "specials": ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        "names": {"bos_token": "<|begin_of_text|>", "eos_token": "<|eot_id|>"},
        "cases": [("system", {}), ("multi-turn", {"date_string": "1 May 2025"}), ("tools", {})],
    },
    "qwen3": {
        "specials": ["<|im_start|>", "<|im_end|>", "<|endoftext|>"],
        "plain_added": ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"],
        "names": {"eos_token": "<|im_end|>"},
        "cases": [("system", {}), ("multi-turn", {}), ("tools", {}), ("thinking", {}), ("inline thinking", {}),
                  ("thinking tools", {}), ("multi-turn", {"enable_thinking": False}),
                  ("tools", {"enable_thinking": False})],
    },
    "deepseek": {
        "specials": [
            "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>", "<｜tool▁sep｜>",
            "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁outputs▁begin｜>", "<｜tool▁outputs▁end｜>", "<｜tool▁output▁begin｜>", "<｜tool▁output▁end｜>",
        ],
        "plain_added": ["<think>", "</think>"],
        "names": {"bos_token": "<｜begin▁of▁sentence｜>", "eos_token": "<｜end▁of▁sentence｜>"},
        "cases": [("system", {}), ("multi-turn", {}), ("tools", {}), ("inline thinking", {})],
    },
    "kimi": {
        "specials": ["<|im_end|>", "<|im_user|>", "<|im_assistant|>", "<|im_system|>", "<|im_middle|>",
                     "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>", "<|tool_call_begin|>",
                     "<|tool_call_argument_begin|>", "<|tool_call_end|>"],
        "names": {"eos_token": "<|im_end|>"},
        "cases": [("system", {}), ("multi-turn", {}), ("tools", {})],
    },
    "gemma": {
        "specials": ["<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"],
        "names": {"bos_token": "<bos>", "eos_token": "<eos>"},
        "cases": [("system", {}), ("multi-turn", {}), ("system multi-turn", {})],
    },
    "mistral": {
        "specials": ["<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
                     "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
        "names": {"bos_token": "<s>", "eos_token": "</s>"},
        "cases": [("system", {}), ("multi-turn", {}), ("system multi-turn", {}), ("tools", {})],
    },
    "harmony": {
        "specials": ["<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"],
        "names": {"eos_token": "<|return|>"},
        "cases": [("system", {}), ("multi-turn", {"reasoning_effort": "low"}), ("tools", {}), ("thinking", {}),
                  ("thinking tools", {})],
    },
}  # fmt: skip
