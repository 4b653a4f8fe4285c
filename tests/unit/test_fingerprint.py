"""The fingerprint of tokenizer and template changes with whatever changes token ids, and with nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from toy_target import make_target, make_tokenizer

from eagle3_lightning.options import TargetOptions
from eagle3_lightning.prompts.chat import ChatTokenizer
from eagle3_lightning.prompts.records import parse_record
from eagle3_lightning.target import inspect_target


@pytest.fixture
def target(tmp_path: Path) -> Path:
    specials = ("<|im_start|>", "<|im_end|>")
    return make_target(tmp_path / "target", make_tokenizer(specials, eos_token=specials[1], bos_token=specials[0]))


def read(target: Path) -> tuple[dict[str, str], list[int]]:
    """Fingerprints, and the ids of a text."""
    chat = ChatTokenizer(inspect_target(TargetOptions(str(target))), {})
    return chat.fingerprint(), chat.encode("a <|im_start|> b <|new|>")


def change(target: Path, **settings: Any) -> None:
    file = target / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | settings))


@pytest.mark.parametrize(
    "settings",
    [{"split_special_tokens": True}, {"extra_special_tokens": ["<|new|>"]}],
    ids=lambda settings: next(iter(settings)),
)
def test_a_setting_that_changes_ids_changes_the_tokenizers(target: Path, settings: dict[str, Any]) -> None:
    before, ids = read(target)
    change(target, **settings)
    after, other_ids = read(target)
    assert ids != other_ids
    assert before["tokenizer"] != after["tokenizer"]
    assert before["template"] == after["template"]


def test_a_special_token_that_a_template_writes_changes_the_tokenizers(target: Path) -> None:
    (target / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    record = parse_record({"prompt": "a"}, "row", {})

    def prompt() -> list[int]:
        return ChatTokenizer(inspect_target(TargetOptions(str(target))), {}).prompt(record)

    before, ids = read(target)[0], prompt()
    change(target, bos_token="<|im_end|>")
    assert prompt() != ids
    assert read(target)[0]["tokenizer"] != before["tokenizer"]


def test_a_template_changes_the_templates_alone(target: Path) -> None:
    before, _ = read(target)
    (target / "chat_template.jinja").unlink(missing_ok=True)
    change(target, chat_template="{{ messages[0]['content'] }}")
    after, _ = read(target)
    assert before["template"] != after["template"]
    assert before["tokenizer"] == after["tokenizer"]


def test_where_a_tokenizer_was_saved_changes_nothing(target: Path) -> None:
    before = read(target)
    change(target, name_or_path="/elsewhere", transformers_version="4.0.0", model_max_length=77)
    assert read(target) == before
