"""How many of a file of prompts are duplicates or loops, by measures of its own (not those of the filters).

    python scripts/measure_prompts.py FILE.jsonl [--show 30]

Rows as `eagle3 prompts synthesize` writes them. Fails if either share is 5 % or more.
"""

import argparse
import gzip
import json
import random
import re
import sys
import unicodedata
from collections.abc import Hashable, Iterable
from pathlib import Path

_LIMIT = 0.05
_MAX_RATIO, _MIN_RATIO_BYTES = 2.5, 120
_MAX_REPEATED, _MIN_TRIGRAMS = 0.3, 10
_SAME_WORDS = 0.8
_FOUR_IN_A_ROW = re.compile(r"(\S.{0,40}?)\1{3,}", re.DOTALL)


def repeats(keys: Iterable[Hashable]) -> set[int]:
    """Places of keys that have come before."""
    seen: set[Hashable] = set()
    found = set()
    for place, key in enumerate(keys):
        if key in seen:
            found.add(place)
        seen.add(key)
    return found


def plain(text: str) -> str:
    """Without case, punctuation and double spaces."""
    return re.sub(r"[\W_]+", " ", unicodedata.normalize("NFKC", text).casefold()).strip()


def same_words(texts: list[str]) -> set[int]:
    """Places of texts whose set of words is nearly that of one before (Jaccard)."""
    words = [set(text.split()) for text in texts]
    return {
        place
        for place, mine in enumerate(words)
        if any(len(mine & other) >= _SAME_WORDS * len(mine | other) for other in words[:place])
    }


def is_loop(text: str) -> bool:
    """Whether gzip finds little in it, many of its word trigrams come again, or a piece stands four times in a row."""
    data, words = text.encode(), text.split()
    trigrams = list(zip(words, words[1:], words[2:], strict=False))
    return (
        (len(data) >= _MIN_RATIO_BYTES and len(data) > _MAX_RATIO * len(gzip.compress(data)))
        or (len(trigrams) >= _MIN_TRIGRAMS and len(set(trigrams)) < (1 - _MAX_REPEATED) * len(trigrams))
        or _FOUR_IN_A_ROW.search(text) is not None
    )


def main() -> int:
    """Print the shares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None, allow_abbrev=False)
    parser.add_argument("file", type=Path)
    parser.add_argument("--show", type=int, default=0, help="print so many of them, drawn at random")
    args = parser.parse_args()
    lines = args.file.read_text(encoding="utf-8").splitlines()
    texts = [json.loads(line)["messages"][0]["content"] for line in lines]
    plain_texts = [plain(text) for text in texts]
    kinds = {
        "the same": repeats(texts),
        "the same but for case, spaces and punctuation": repeats(plain_texts),
        "the same first 40 characters": repeats(text[:40] for text in texts),
        f"at least {_SAME_WORDS:.0%} of the words in common": same_words(plain_texts),
    }
    loops = {place for place, text in enumerate(texts) if is_loop(text)}
    print(f"{len(texts)} prompts")
    for name, found in kinds.items():
        print(f"{name}: {len(found)} ({len(found) / len(texts):.1%})")
    duplicates = set().union(*kinds.values())
    print(f"duplicates of any kind: {len(duplicates)} ({len(duplicates) / len(texts):.1%})")
    print(f"loops: {len(loops)} ({len(loops) / len(texts):.1%})")
    for text in random.Random(0).sample(texts, min(args.show, len(texts))):
        print(f"- {text!r}")
    return int(max(len(duplicates), len(loops)) >= _LIMIT * len(texts))


if __name__ == "__main__":
    sys.exit(main())
