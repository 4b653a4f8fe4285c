"""A producer process on the toy engine of queue_toy.py, as the supervisor starts it.

`python -m toy_producer --spec FILE`; TOY_ENDS_AFTER_S in the environment holds its end back, SIGTERM or not; with
TOY_MISTAKE it finds one of the user's and does not start.
"""

import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import NoReturn

import msgspec
from queue_toy import ToyEngine, serve_toy

from eagle3_lightning.errors import ConfigError
from eagle3_lightning.extract.producer import ProducerSpec, serve
from eagle3_lightning.extract.watchdog import watch
from eagle3_lightning.stream.channel import Channel


def main() -> int:
    spec = msgspec.json.decode(Path(sys.argv[sys.argv.index("--spec") + 1]).read_bytes(), type=ProducerSpec)
    watch(spec.trainer_pid, os.getpid(), Path(spec.private_dir))
    if delay_s := float(os.environ.get("TOY_ENDS_AFTER_S", "0")):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=spec.socket_fd))
    if mistake := os.environ.get("TOY_MISTAKE"):

        def refuse() -> NoReturn:
            raise ConfigError("data.engine.extra.foo", float(mistake), "there is no such thing", "Leave it out.")

        return serve(channel, refuse)
    status = serve_toy(channel, ToyEngine(), spec.arena_path, spec.arena_layout)
    time.sleep(delay_s)
    return status


if __name__ == "__main__":
    sys.exit(main())
