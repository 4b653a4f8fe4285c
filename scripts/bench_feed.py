"""Stored samples as batches: how fast, and what it costs a training step that runs beside it.

The samples are random states that this script writes to a temporary directory, in the format of `data.cache.dir`, and
that lie in the page cache when they are read. Two shapes: `small`, the rows of SmolLM2-135M in samples of about 190
tokens, where a pack is many files; `large`, the rows of an 8B target in samples of 2,000 tokens, where it is few.

    feed    packs read one after the other and thrown away: milliseconds a pack, slots a second.
    alone   the main thread runs steps of 1,000 small torch operations, as a step of a small draft does to a GPU.
    beside  the same steps, each on a batch that was read meanwhile. What is more than `alone` is Python's lock, which
            either side gives away with every torch operation, and the machine's cores and memory. `asleep` is the part
            of the step in which the main thread could not go on, though a core may have been free: it waits for the
            lock. `wait` is time without a batch, in neither.

The figures are medians over all passes. `PYTHONPATH=OTHER_CHECKOUT` reads with the code that lies there.
"""

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

import eagle3_lightning
from eagle3_lightning.data_feed import DiskFeed
from eagle3_lightning.data_stream import Prefetcher, RoundMaker, make_filler
from eagle3_lightning.stream.files import FinalNorm, StoredSample, write_sample
from eagle3_lightning.stream.packer import Packer

NUM_AUX = 3
PACK_TOKENS = 8192
ROUNDS_READY = 2  # as the trainer's
STEP_OPS = 1_000
STEP_VALUES = 8_000  # of an operation, 5 to 10 us without the lock: as long as a kernel takes to launch
WORK = range(4_000)  # of Python between two operations, about 40 us
SHAPES = {"small": (576, (120, 260), 430), "large": (4096, (1_950, 2_050), 8)}  # hidden, tokens of a sample, samples


@dataclass
class Made:
    """A sample of random states, with what write_sample reads of a finished one."""

    name: str
    states: torch.Tensor
    token_ids: list[int]
    spans: list[tuple[int, int]]
    prompt_tokens: int
    finish_reason: str = "stop"

    @property
    def num_rows(self) -> int:
        """Tokens with states."""
        return len(self.states)

    def rows(self) -> torch.Tensor:
        """The states."""
        return self.states


def write_samples(directory: Path, hidden_size: int, tokens: tuple[int, int], count: int, norm: FinalNorm) -> int:
    """Write `count` samples; the bytes of all of them."""
    generator, lengths = torch.Generator().manual_seed(0), random.Random(0)
    size_bytes = 0
    for number in range(count):
        length = lengths.randint(*tokens)
        states = torch.randn(length, NUM_AUX + 1, hidden_size, generator=generator).bfloat16()
        states[:, -1] = norm.apply(states[:, -1], torch.bfloat16)
        ids = torch.randint(50_000, (length,), generator=generator).tolist()
        sample = Made(f"made-{number}", states, ids, [(length // 3, length)], length // 3)
        size_bytes += write_sample(directory / f"hs_{number}.safetensors", sample, norm, fp8=False)  # type: ignore[arg-type]
    return size_bytes


class Feed:
    """The trainer's own readers over the samples of a directory, without end."""

    def __init__(self, directory: Path, hidden_size: int, count: int, norm: FinalNorm) -> None:
        """Start to read."""

        def load(stream, index):  # type: ignore[no-untyped-def]
            path = directory / f"hs_{index % count}.safetensors"
            return StoredSample(path, stream, index, norm, torch.bfloat16)

        feed = DiskFeed(load, PACK_TOKENS, 0.05)
        feed.begin("train", 0, None)
        filler = make_filler(NUM_AUX, hidden_size, torch.bfloat16)
        rounds = RoundMaker(feed, "train", Packer(PACK_TOKENS, False, NUM_AUX), 0, count, 0, 1, filler)
        self._prefetcher = Prefetcher(iter(rounds), ROUNDS_READY, pin=False)

    def get(self) -> int:
        """Slots of the next batch, which is thrown away."""
        round_ = self._prefetcher.get()
        assert round_ is not None
        return round_.batch.num_slots

    def close(self) -> None:
        """Stop reading."""
        self._prefetcher.stop()
        self._prefetcher.join(60.0)


def step(values: torch.Tensor) -> None:
    """Many small operations, and some Python between them."""
    for _ in range(STEP_OPS):
        values.cumsum_(0)  # in one thread, whatever the size
        sum(WORK)


def timed(function: Callable[[], object]) -> float:
    """Milliseconds of a call."""
    started_s = time.perf_counter()
    function()
    return 1e3 * (time.perf_counter() - started_s)


def awake_ms() -> float:
    """Milliseconds that this thread has run on a core or waited for one."""
    ran_ns, delayed_ns, _ = Path("/proc/thread-self/schedstat").read_text().split()
    return (int(ran_ns) + int(delayed_ns)) / 1e6


def measure(make_feed: Callable[[], Feed], num_rounds: int) -> dict[str, list[float]]:
    """One pass of each; milliseconds of each round or step, and the slots of each round."""
    values, slots = torch.zeros(STEP_VALUES), []
    feed = make_feed()
    for _ in range(ROUNDS_READY + 1):
        feed.get()
    read = [timed(lambda: slots.append(feed.get())) for _ in range(num_rounds)]
    feed.close()
    alone = [timed(lambda: step(values)) for _ in range(num_rounds)]
    feed, beside, wait, asleep = make_feed(), [], [], []
    for number in range(num_rounds + ROUNDS_READY):
        waited = timed(feed.get)
        before_ms = awake_ms()
        busy = timed(lambda: step(values))
        if number >= ROUNDS_READY:
            wait.append(waited)
            beside.append(busy)
            asleep.append(busy - (awake_ms() - before_ms))
    feed.close()
    slots_read = [float(count) for count in slots]
    return {"feed": read, "slots": slots_read, "alone": alone, "beside": beside, "asleep": asleep, "wait": wait}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--shapes", default=",".join(SHAPES), help=f"of {', '.join(SHAPES)}")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=30, help="packs and steps of each pass")
    parser.add_argument("--json", type=Path, help="write every figure here as well")
    args = parser.parse_args()
    print(f"{Path(eagle3_lightning.__file__).parent}, torch {torch.__version__}, {torch.get_num_threads()} threads")
    results = {}
    for shape in args.shapes.split(","):
        hidden_size, tokens, count = SHAPES[shape]
        norm = FinalNorm(torch.rand(hidden_size, generator=torch.Generator().manual_seed(1)) + 0.5, 1e-5)
        all_ms: dict[str, list[float]] = {}
        with tempfile.TemporaryDirectory() as place:
            directory = Path(place)
            size_bytes = write_samples(directory, hidden_size, tokens, count, norm)
            for _ in range(args.passes):
                figures = measure(lambda: Feed(directory, hidden_size, count, norm), args.rounds)  # noqa: B023
                for name, values in figures.items():
                    all_ms.setdefault(name, []).extend(values)
        slots_per_s = 1e3 * sum(all_ms["slots"]) / sum(all_ms["feed"])
        middle = {name: statistics.median(values) for name, values in all_ms.items()}
        times = middle["beside"] / middle["alone"]
        print(
            f"{shape}: {count} samples, {size_bytes / 2**20:.0f} MiB. feed {middle['feed']:.1f} ms a pack, "
            f"{slots_per_s:,.0f} slots/s. step alone {middle['alone']:.1f} ms, beside {middle['beside']:.1f} ms "
            f"(x{times:.2f}), asleep {middle['asleep']:.1f} ms, wait {middle['wait']:.1f} ms"
        )
        results[shape] = middle | {"slots_per_s": slots_per_s}
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
