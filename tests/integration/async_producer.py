"""The producer with asynchronous scheduling on the CPU, where vLLM's platform switches it off."""

import sys

from eagle3_lightning.extract import producer


def keep_asynchronous() -> None:
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def keep(vllm_config):
        check(vllm_config)
        vllm_config.scheduler_config.async_scheduling = True

    CpuPlatform.check_and_update_config = staticmethod(keep)


def start_asynchronous(spec, channel, start=producer._start_vllm):
    keep_asynchronous()
    made = start(spec, channel)
    core = made[0]._engine.engine_core.engine_core  # in this process
    runner = core.model_executor.driver_worker.worker.model_runner
    ready = getattr(runner, "use_async_scheduling", True)  # the V2 runner knows no other way
    print("SCHEDULER", type(core.scheduler).__name__, core.batch_queue_size, ready, flush=True)
    return made


if __name__ == "__main__":
    producer._start_vllm = start_asynchronous
    sys.exit(producer.main())
