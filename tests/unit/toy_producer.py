"""A producer process on the toy engine of queue_toy.py, as the supervisor starts it.

`python -m toy_producer --spec FILE`; TOY_ENDS_AFTER_S in the environment holds its end back, SIGTERM or not.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path

import msgspec
from queue_toy import ToyEngine, serve_toy

from eagle3_lightning.extract.producer import ProducerSpec
from eagle3_lightning.extract.watchdog import watch
from eagle3_lightning.stream.channel import Channel


def main() -> int:
    spec = msgspec.json.decode(Path(sys.argv[sys.argv.index("--spec") + 1]).read_bytes(), type=ProducerSpec)
    watch(spec.trainer_pid, os.getpid(), Path(spec.private_dir))
    if delay_s := float(os.environ.get("TOY_ENDS_AFTER_S", "0")):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    status = serve_toy(Channel(socket.socket(fileno=spec.socket_fd)), ToyEngine(), spec.arena_path, spec.arena_layout)
    time.sleep(delay_s)
    return status


if __name__ == "__main__":
    sys.exit(main())
