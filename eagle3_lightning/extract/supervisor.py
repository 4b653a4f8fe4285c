"""Starts, watches, restarts and ends the producer; owns the arena and the hub of the queue. Lives on rank 0."""

import atexit
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import msgspec

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.extract import versions
from eagle3_lightning.extract.engine import EngineSettings, check_capacity, check_extra
from eagle3_lightning.extract.environment import child_environment
from eagle3_lightning.extract.producer import ProducerSpec
from eagle3_lightning.extract.refusals import check_devices
from eagle3_lightning.extract.watchdog import kill_group, unlink_shared_memory, wait_group
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import EngineOptions, QueueOptions, SamplingOptions
from eagle3_lightning.stream.arena import Arena
from eagle3_lightning.stream.hub import Hub
from eagle3_lightning.stream.messages import Ready, Sampling
from eagle3_lightning.stream.queue import QueueHandle, SampleQueue
from eagle3_lightning.target import TargetInfo
from eagle3_lightning.vllm_log import log_tail

log = logging.getLogger(__name__)
SHUTDOWN_TIMEOUT_S = 10.0
TERM_TIMEOUT_S = 5.0
KILL_TIMEOUT_S = 10.0
# Longer than the supervising thread needs to end what it watches.
MONITOR_TIMEOUT_S = 2 * TERM_TIMEOUT_S + KILL_TIMEOUT_S + 5.0
# A socket's path has at most 107 bytes, and vLLM appends a UUID to our eagle3-xxxxxxxx.
MAX_SOCKET_DIR_BYTES = 107 - len("/eagle3-xxxxxxxx/") - 36


class Extractor:
    """The producer of hidden states as the trainer sees it: `start`, `queue`, `close`.

    Attributes:
        log_path: where vLLM's output goes.
        producer_module: what is run as the producer.
    """

    producer_module = "eagle3_lightning.extract.producer"

    def __init__(
        self,
        target_info: TargetInfo,
        plan: LayerPlan,
        engine: EngineOptions,
        queue: QueueOptions,
        sampling: SamplingOptions,
        run_dir: Path,
        world_size: int = 1,
        *,
        max_restarts: int = 0,
        trust_remote_code: bool = False,
    ) -> None:
        """Check everything that can be checked without vLLM.

        Args:
            target_info: the target.
            plan: layers to capture.
            engine: options of vLLM.
            queue: options of the arena.
            sampling: how answers are sampled.
            run_dir: vllm.log is written there.
            world_size: ranks of the trainer.
            max_restarts: how often a dead producer is started again.
            trust_remote_code: see TargetOptions.

        Raises:
            ConfigError: vLLM is missing or too old, an option collides with the project's own, a sample of
                `max_model_len` does not fit the arena, the arena not the memory, or no socket can be made.
        """
        _check(engine, queue)
        self.log_path = run_dir / "vllm.log"
        self._engine, self._queue_options = engine, queue
        self._world_size, self._max_restarts = world_size, max_restarts
        self._num_layers, self._hidden_size = len(plan.aux) + 1, target_info.hidden_size
        self._settings = _engine_settings(target_info, plan, engine, sampling, trust_remote_code)
        Arena.plan(queue.capacity_tokens, queue.block_tokens, self._num_layers, self._hidden_size, self._settings.dtype)
        os.rmdir(_make_private_dir(queue.socket_dir))  # it can be made
        self._queue: SampleQueue | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._ended_group: int | None = None
        self._monitor: threading.Thread | None = None
        self._opened = ExitStack()  # what `start` has made, to be undone by `close`
        self._lost = threading.Event()
        self._lost_reason = ""
        self._log_start_bytes = 0
        self._closing = False
        self._closed = False
        # The thread that assembles batches ends vLLM when all samples are on disk, the main thread at any time. Whoever
        # comes second goes on when all is ended; every wait of the first has its deadline. Reentrant: the handler of a
        # signal may close in the middle of a close.
        self._ending = threading.RLock()

    def start(self) -> None:
        """Create arena and hub and start the producer; returns at once, `wait_ready` waits.

        Raises:
            ConfigError: the arena does not fit in memory, or no socket can be made.
        """
        options = self._queue_options
        self._arena = Arena.create(
            options.capacity_tokens, options.block_tokens, self._num_layers, self._hidden_size, self._settings.dtype
        )
        self._opened.callback(self._arena.close)
        atexit.register(self.close)
        self._private_dir = _make_private_dir(options.socket_dir)
        self._opened.callback(shutil.rmtree, self._private_dir, ignore_errors=True)
        listen = self._private_dir / "hub" if self._world_size > 1 else None
        num_blocks, max_running = self._arena.layout.num_blocks, self._settings.max_num_seqs
        self._hub = Hub(num_blocks, options.block_tokens, self._world_size, listen, max_running)
        self._opened.callback(self._hub.close)
        self._hub.on_producer_lost = self._note_lost
        self._hub.start()
        self.handle = QueueHandle(
            arena_path=self._arena.path,
            arena_layout=self._arena.layout,
            socket_path=str(listen) if listen else None,
            window=4 * self._engine.max_num_seqs,
            step_timeout_s=self._engine.step_timeout_s,
            max_dropped_share=options.max_dropped_share,
        )
        self._spawn(restarts=0)
        self._monitor = threading.Thread(target=self._watch, name="eagle3-supervisor", daemon=True)
        self._monitor.start()

    def queue(self, rank: int = 0) -> SampleQueue:
        """The queue of a rank in this process, which is rank 0; others take `handle` to `SampleQueue.connect`."""
        if self._queue is None:
            ours, theirs = socket.socketpair()
            self._hub.attach_rank(theirs, rank)
            self._queue = SampleQueue(ours, self._arena, self.handle)
        return self._queue

    def wait_ready(self) -> Ready:
        """Wait until vLLM is up and its self-check has passed.

        Raises:
            ProducerError: it failed, with the last lines of its log.
        """
        return self.queue().wait_ready(self._engine.start_timeout_s + KILL_TIMEOUT_S)

    @property
    def pid(self) -> int | None:
        """Process id of the producer, which leads the process group of all that it starts."""
        return self._process.pid if self._process else None

    def end_producer(self) -> None:
        """End vLLM while other ranks may still read what it made; `close` is still due."""
        with self._ending:
            self._closing = True
            if self._process is not None and not self._closed:
                self._end_producer()

    def close(self) -> None:
        """End the producer and everything it started, within seconds; a second call waits for the first, if need be."""
        with self._ending:
            if not self._closed:
                self._close()

    def _close(self) -> None:
        # A signal may have ended `start` at any line: what is there is closed.
        self._closing = True
        if self._process is not None:
            self._end_producer()
        if self._monitor is not None and self._monitor.ident is not None:
            self._monitor.join(timeout=MONITOR_TIMEOUT_S)
            self._end_group()  # it may have been starting another one just then
        if self._queue is not None:
            self._queue.close()
        self._opened.close()
        atexit.unregister(self.close)
        self._closed = True

    # -- the process -----------------------------------------------------------------------------------------------

    def _end_producer(self) -> None:
        assert self._process is not None
        if self._hub.serving:  # one that still starts does not listen
            self._hub.shutdown_producer()
            try:
                self._process.wait(SHUTDOWN_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.warning("the producer did not end within %.0f s and is killed", SHUTDOWN_TIMEOUT_S)
        self._end_group()

    def _spawn(self, restarts: int) -> None:
        ours, theirs = socket.socketpair()
        spec = ProducerSpec(
            self._settings, self._arena.path, self._arena.layout, os.getpid(), str(self._private_dir), theirs.fileno()
        )
        spec_path = self._private_dir / "spec.json"
        spec_path.write_bytes(msgspec.json.encode(spec))
        environment = child_environment()
        # OpenMP reads these once, when the producer's imports load torch. Its threads share the cores with the trainer:
        # one that waits for the others must let go of its core.
        environment.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        if self._settings.cpu_threads is not None:
            environment["OMP_NUM_THREADS"] = str(self._settings.cpu_threads)
        environment["TMPDIR"] = str(self._private_dir)  # what vLLM leaves there goes with our own sockets
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        with self.log_path.open("ab") as log_file, theirs:
            self._log_start_bytes = log_file.tell()
            self._process = subprocess.Popen(
                [sys.executable, "-m", self.producer_module, "--spec", str(spec_path)],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=subprocess.STDOUT,
                env=environment,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # Ctrl-C is the trainer's to handle, and the group can be killed as one
            )
        self._ended_group = None
        self._lost.clear()
        self._lost_reason = ""
        self._started_s = time.monotonic()
        self._hub.attach_producer(ours, restarts)
        log.info("vLLM starts as process %d, log in %s", self._process.pid, self.log_path)

    def _note_lost(self, reason: str) -> None:
        self._lost_reason = reason
        self._lost.set()

    def _watch(self) -> None:
        """Until the run ends: wait for the producer's death, start it again or fail the queue."""
        try:
            self._supervise()
        except Exception as error:  # a fault of ours must end the run, not leave it waiting
            log.exception("the supervisor of the producer failed")
            self._hub.fail(f"the supervisor of the producer failed: {error!r}")

    def _supervise(self) -> None:
        restarts = 0
        while True:
            fault = self._wait_for_fault()
            if fault is None:
                return
            was_ready = self._hub.ready is not None
            self._end_group()
            if self._closing:
                return
            if (mistake := self._hub.mistake) is not None:  # another start would end the same way
                self._hub.fail(str(mistake.as_error()), mistake)
                return
            if not was_ready or restarts >= self._max_restarts:
                limit = f" after {restarts} restarts" if restarts else ""
                self._hub.fail(f"{fault}{limit}.{log_tail(self.log_path, self._log_start_bytes)}")
                return
            restarts += 1
            log.warning("%s; restart %d of %d", fault, restarts, self._max_restarts)
            self._spawn(restarts)

    def _wait_for_fault(self) -> str | None:
        assert self._process is not None
        name = f"vLLM's producer (process {self._process.pid})"
        while True:
            lost = self._lost.wait(timeout=0.2) or self._process.poll() is not None
            if self._closing:
                return None
            if lost:
                self._lost.wait(timeout=1.0)  # the hub reads the producer's last words a moment after its end
                if self._lost_reason:
                    return f"{name} failed: {self._lost_reason}"
                return f"{name} ended without a word, {self._exit_status()}"
            waited_s = time.monotonic() - self._started_s
            if not self._hub.serving and waited_s > self._engine.start_timeout_s:
                return f"{name} was not ready after data.engine.start_timeout_s = {self._engine.start_timeout_s}"

    def _exit_status(self) -> str:
        assert self._process is not None
        try:
            return f"exit status {self._process.wait(TERM_TIMEOUT_S)}"
        except subprocess.TimeoutExpired:
            return "its connection is closed but it hangs"

    def _end_group(self) -> None:
        """Leave no process of the producer's group: first politely, then not."""
        process = self._process
        assert process is not None
        group = process.pid
        if group == self._ended_group:  # its number may be another's by now: a run goes on for hours without vLLM
            return
        unlink_shared_memory(group, self._private_dir)  # while it is seen who has it
        kill_group(group, signal.SIGTERM)
        if wait_group(group, TERM_TIMEOUT_S):
            kill_group(group, signal.SIGKILL)
        # What is left now is at most Python's resource trackers, which are cleaning up and end by themselves.
        if left := wait_group(group, KILL_TIMEOUT_S):
            log.error("processes %s of the producer do not end", left)
        unlink_shared_memory(group, self._private_dir)  # of workers that were just starting
        process.poll()
        self._ended_group = None if left else group


def _engine_settings(
    target_info: TargetInfo, plan: LayerPlan, engine: EngineOptions, sampling: SamplingOptions, trust_remote_code: bool
) -> EngineSettings:
    return EngineSettings(
        model_path=str(target_info.path),
        # vLLM's own `auto` would turn a float32 checkpoint into bfloat16; what is asked for is what is run.
        dtype=target_info.dtype if engine.dtype == "auto" else engine.dtype,
        aux_layers=plan.aux,
        num_layers=target_info.num_layers,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        max_num_batched_tokens=engine.max_num_batched_tokens,
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        kv_cache_gib=engine.kv_cache_gib,
        enforce_eager=engine.enforce_eager,
        cpu_threads=engine.cpu_threads,
        trust_remote_code=trust_remote_code,
        extra=engine.extra,
        sampling=Sampling(target_info.eos_token_ids, sampling.temperature, sampling.top_p, sampling.top_k),
    )


def _check(engine: EngineOptions, queue: QueueOptions) -> None:
    vllm = versions.describe()
    if vllm.tap is None:
        raise ConfigError("data.engine", vllm.version, vllm.problems[0], vllm.remedies[0])
    check_extra(engine.extra)
    check_capacity(engine, queue)
    check_devices(engine)


def _make_private_dir(parent: Path | None) -> Path:
    parent = Path(tempfile.gettempdir()) if parent is None else parent
    problem = None
    if not parent.is_dir():
        problem = "it is not a directory"
    elif len(os.fsencode(parent)) > MAX_SOCKET_DIR_BYTES:
        problem = f"its path is longer than {MAX_SOCKET_DIR_BYTES} bytes, too long for the Unix sockets in it"
    else:
        try:
            return Path(tempfile.mkdtemp(prefix="eagle3-", dir=parent))  # mode 0700
        except OSError as error:
            problem = f"no directory can be made there ({error})"
    raise ConfigError(
        "data.queue.socket_dir", str(parent), problem, "Name a directory with a short path that you can write to."
    )
