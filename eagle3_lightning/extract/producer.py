"""The process that owns vLLM: requests come over a socket, finished samples go back, rows only ever lie in the arena.

`python -m eagle3_lightning.extract.producer --spec FILE.json`, started by supervisor.py. It holds no state that would
be missed: the hub knows what it owes and whose blocks are whose, and gives all of that to the next one if it dies.
"""

import argparse
import os
import queue
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from eagle3_lightning.errors import ConfigError, Eagle3Error, ProducerError
from eagle3_lightning.extract import versions
from eagle3_lightning.extract.engine import Engine, EngineSettings, Finished, VllmEngine, prepare_environment
from eagle3_lightning.extract.watchdog import unlink_shared_memory, watch
from eagle3_lightning.stream.arena import Arena, ArenaLayout
from eagle3_lightning.stream.channel import Channel, ChannelClosed
from eagle3_lightning.stream.messages import (
    AnyMessage,
    Dropped,
    Failed,
    Mistake,
    Ready,
    Sample,
    Shutdown,
    Stats,
    Submit,
)

STATS_EVERY_S = 1.0
LANDING_TIMEOUT_S = 60.0
MAX_REASON_CHARACTERS = 400
_IDLE_S = 0.2
_LANDING_POLL_S = 0.001
_JOIN_TIMEOUT_S = 5.0


class ProducerSpec(msgspec.Struct, frozen=True):
    """What the supervisor tells the producer.

    Attributes:
        engine: the engine's settings.
        arena_path: the trainer's arena.
        arena_layout: its sizes.
        trainer_pid: rank 0 of the trainer.
        private_dir: for vLLM's sockets.
        socket_fd: inherited end of the connection to the hub.
    """

    engine: EngineSettings
    arena_path: str
    arena_layout: ArenaLayout
    trainer_pid: int
    private_dir: str
    socket_fd: int


class Producer:
    """The loop between hub and engine."""

    def __init__(self, engine: Engine, arena: Arena, channel: Channel) -> None:
        """Start reading requests.

        Args:
            engine: started, writing to `arena`.
            arena: the trainer's.
            channel: to the hub.
        """
        self._engine = engine
        self._arena = arena
        self._channel = channel
        self._inbox: queue.SimpleQueue[AnyMessage | None] = queue.SimpleQueue()
        self._owed: dict[int, Submit] = {}
        self._landing: dict[int, tuple[Sample, float]] = {}
        self._busy_s = 0.0
        self._next_stats_s = 0.0
        self._listener = threading.Thread(target=self._listen, name="eagle3-inbox", daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        # A thread of its own, so that the hub never waits for a forward pass to end.
        try:
            while True:
                for message in self._channel.receive(_IDLE_S):
                    self._inbox.put(message)
        except ChannelClosed:
            pass
        finally:  # whatever ended it, the producer must not wait for a request that nobody reads
            self._inbox.put(None)

    def run(self) -> None:
        """Serve until the hub says Shutdown or is gone."""
        while True:
            if not self._take_requests():
                return
            if self._engine.num_running:
                started_s = time.monotonic()
                for finished in self._engine.step():
                    self._finish(finished)
                self._busy_s += time.monotonic() - started_s
            self._deliver_landed()
            self._report()

    def join(self) -> None:
        """Wait for the thread that reads requests, when the channel is closed: Python's own end would abort in it."""
        self._listener.join(_JOIN_TIMEOUT_S)

    def _take_requests(self) -> bool:
        wait_s = 0.0 if self._engine.num_running else _LANDING_POLL_S if self._landing else _IDLE_S
        try:
            message = self._inbox.get(timeout=wait_s) if wait_s else self._inbox.get_nowait()
            while True:
                match message:
                    case Submit():
                        self._start(message)
                    case Shutdown() | None:
                        return False
                    case _:
                        raise TypeError(f"the hub sent {message}")
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _start(self, request: Submit) -> None:
        self._owed[request.serial] = request
        try:
            self._engine.submit(request)
        except ValueError as error:
            self._drop(request, "too_long" if "max_model_len" in str(error) else "aborted", str(error))

    def _drop(self, request: Submit, reason: str, detail: str) -> None:
        del self._owed[request.serial]
        self._channel.send(Dropped(request.stream, request.index, request.name, reason, detail, request.serial))  # type: ignore[arg-type]

    def _finish(self, finished: Finished) -> None:
        request = self._owed[finished.serial]
        if finished.finish_reason not in ("stop", "length"):
            self._drop(request, "aborted", f"vLLM ended it: {finished.finish_reason}")
            return
        sample = make_sample(request, finished)
        if sample.num_rows < 2:
            self._drop(request, "empty_mask", "the sample has fewer than two tokens with states")
            return
        self._landing[sample.serial] = (sample, time.monotonic() + LANDING_TIMEOUT_S)

    def _deliver_landed(self) -> None:
        for sample, deadline_s in list(self._landing.values()):
            written = self._arena.num_written(sample.serial, sample.blocks)
            # A gap, or rows that never come, are the trainer's to judge: it checks every sample it gets.
            if 0 <= written < sample.num_rows and time.monotonic() < deadline_s:
                continue
            del self._landing[sample.serial], self._owed[sample.serial]
            self._channel.send(sample)

    def _report(self) -> None:
        now_s = time.monotonic()
        if now_s < self._next_stats_s:
            return
        self._next_stats_s = now_s + STATS_EVERY_S
        num_prompt, num_answer, _ = self._arena.counters.tolist()
        self._channel.send(Stats(num_prompt, num_answer, self._busy_s, self._engine.num_running))


def make_sample(request: Submit, finished: Finished) -> Sample:
    """The sample that a finished request has become; what is supervised is the answer, or the spans that were given."""
    prompt_tokens = len(request.prompt_ids)
    if request.max_new_tokens:
        token_ids = request.prompt_ids + finished.answer_ids
        spans, num_rows = [(prompt_tokens, len(token_ids))], len(token_ids) - 1
    else:
        token_ids, spans, num_rows = request.prompt_ids, request.spans, prompt_tokens
    return Sample(
        serial=request.serial,
        stream=request.stream,
        index=request.index,
        name=request.name,
        token_ids=token_ids,
        prompt_tokens=prompt_tokens,
        spans=spans,
        num_rows=num_rows,
        blocks=request.blocks,
        finish_reason=finished.finish_reason,
    )


def serve(channel: Channel, start: Callable[[], tuple[Engine, Arena, Ready]]) -> int:
    """Start an engine and run the loop; the hub learns of every failure before the process ends.

    Args:
        channel: to the hub.
        start: makes the engine, attaches it to the arena and checks it.

    Returns:
        The exit status.
    """
    engine: Engine | None = None
    producer: Producer | None = None
    try:
        engine, arena, ready = start()
        channel.send(ready)
        producer = Producer(engine, arena, channel)
        producer.run()
        return 0
    except ChannelClosed as error:  # the trainer cannot be told: the end of vllm.log does
        print(f"eagle3: the trainer does not listen: {error}", flush=True)
        return 1
    except Exception as error:
        traceback.print_exc()
        ours = isinstance(error, Eagle3Error)
        mistake = Mistake.of(error) if isinstance(error, ConfigError) else None
        channel.send(Failed(str(error) if ours else f"{type(error).__name__}: {error}", mistake))
        return 1
    finally:
        channel.close()
        if producer is not None:
            producer.join()
        if engine is not None:
            engine.close()


def _end_at_once(channel: Channel, reason: str) -> None:
    # The main thread may wait for the dead process for ever, so nothing is asked of it. The supervisor sweeps up.
    print(f"eagle3: {reason}, ending", flush=True)
    channel.send(Failed(reason))
    os._exit(1)


def _start_vllm(spec: ProducerSpec, channel: Channel) -> tuple[Engine, Arena, Ready]:
    from eagle3_lightning.extract.selfcheck import SelfCheck
    from eagle3_lightning.options import TargetOptions
    from eagle3_lightning.target import inspect_target

    found = versions.installed()
    assert found is not None, "the supervisor checks this before it starts us"
    try:
        engine = VllmEngine(spec.engine, on_death=lambda who: _end_at_once(channel, f"{who} died"))
    except ConfigError:
        raise
    except Exception as error:
        raise ProducerError(
            f"vLLM {found[1]} does not start with target.path = {spec.engine.model_path!r} and these data.engine "
            f"options: {_shortened(error)}. If `vllm serve` cannot load it either, choose another target or vLLM."
        ) from error
    unlink_shared_memory(os.getpgid(0), Path(spec.private_dir))
    notes = SelfCheck(engine, inspect_target(TargetOptions(spec.engine.model_path))).run()
    if engine.on_cpu and spec.engine.sampling.temperature > 0:
        notes.append("vLLM on the CPU cannot sample with per-request seeds: answers differ from run to run")
    arena = Arena.open(spec.arena_path, spec.arena_layout)
    engine.attach(spec.arena_path, spec.arena_layout)
    layout = spec.arena_layout
    ready = Ready(found[1], engine.tap, layout.num_layers, layout.hidden_size, layout.dtype, os.getpid(), notes)
    print("\n".join(f"eagle3: {note}" for note in notes), flush=True)
    return engine, arena, ready


def _shortened(error: Exception) -> str:
    words = " ".join(f"{type(error).__name__}: {error}".split()).rstrip(".")  # may list every model
    return words if len(words) <= MAX_REASON_CHARACTERS else f"{words[:MAX_REASON_CHARACTERS]}…"


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--spec", type=Path, required=True)
    spec = msgspec.json.decode(parser.parse_args().spec.read_bytes(), type=ProducerSpec)
    watch(spec.trainer_pid, os.getpid(), Path(spec.private_dir))
    channel = Channel(socket.socket(fileno=spec.socket_fd))

    def start() -> tuple[Engine, Arena, Ready]:
        prepare_environment(spec.engine, spec.trainer_pid, Path(spec.private_dir))
        return _start_vllm(spec, channel)

    return serve(channel, start)


if __name__ == "__main__":
    sys.exit(main())
