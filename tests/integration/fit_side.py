"""The trainer's side of an extraction as a program of its own, for tests that kill processes.

`python fit_side.py TARGET RUN_DIR NUM_SAMPLES MAX_RESTARTS` prints one line per event: `producer PID` at the start,
`ready`, `sample INDEX CHECKSUM` for each sample in order, `end` behind the last.
"""

import sys
from pathlib import Path

from extract_support import ENGINE, QUEUE, random_prompts, read_target

from eagle3_lightning.errors import Eagle3Error
from eagle3_lightning.extract.supervisor import Extractor
from eagle3_lightning.layers import LayerPlan
from eagle3_lightning.options import SamplingOptions
from eagle3_lightning.stream.messages import Submit
from eagle3_lightning.stream.queue import FinishedSample


def main() -> int:
    target, run_dir, num_samples, max_restarts = (
        Path(sys.argv[1]),
        Path(sys.argv[2]),
        int(sys.argv[3]),
        int(sys.argv[4]),
    )
    info = read_target(target)
    prompts = random_prompts(info, [3 + i % 20 for i in range(num_samples)])
    extractor = Extractor(
        info, LayerPlan((1, 3, 5), 7), ENGINE, QUEUE, SamplingOptions(), run_dir, max_restarts=max_restarts
    )
    extractor.start()
    print("producer", extractor.pid, flush=True)
    try:
        extractor.wait_ready()
        print("ready", flush=True)
        queue = extractor.queue()
        queue.feed("train", (Submit("train", i, f"s{i}", p, [], 40) for i, p in enumerate(prompts)))
        while (sample := queue.get("train")) is not None:
            assert isinstance(sample, FinishedSample), sample
            print("sample", sample.index, sum(sample.token_ids), flush=True)
            sample.release()
        print("end", flush=True)
    except Eagle3Error as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        extractor.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
