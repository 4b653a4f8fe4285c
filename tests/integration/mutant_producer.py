"""The producer with one fault put into its tap: what the self-check and the row checks must notice.

`EAGLE3_MUTANT` names the fault; one that ends in `later` begins only after the self-check.
"""

import os
import sys

import torch

from eagle3_lightning.extract import producer


def install(name: str) -> None:
    from eagle3_lightning.extract import copiers, tap

    worker = tap.CpuTapWorker
    load_model, attach = worker.load_model, worker.eagle3_attach
    later = name.endswith(" later")
    name = name.removesuffix(" later")
    attached = []

    def count_attach(self, *args):
        attached.append(args)
        return attach(self, *args)

    worker.eagle3_attach = count_attach
    if name.startswith("shift "):
        _, place, by = name.split()

        def shifted_load(self, *args, **kwargs):
            loaded = load_model(self, *args, **kwargs)
            ids = list(tap.to_vllm(self._settings.aux_layers))
            ids[int(place)] += int(by)
            self.model_runner.get_model().set_aux_hidden_state_layers(tuple(ids))
            return loaded

        worker.load_model = shifted_load
        return

    copy = copiers.HostCopier.copy
    steps = []

    def spoiled_copy(self, writer, step, layers, ids):
        steps.append(step)
        if later and len(attached) < 2:
            return copy(self, writer, step, layers, ids)
        layers = list(layers)
        norm, last_aux = worker.spoiled_model.model.norm, layers[-2].clone()
        many = len(step.requests) > 1
        match name:
            case "last layer one short":
                layers[-1] = norm(last_aux)  # the third auxiliary layer is the one before the last here
            case "norm twice":
                layers[-1] = norm(layers[-1].clone())
            case "no norm":
                layers[-1] = worker.raw_last[0][: len(ids)]
            case "rows of two requests swapped" if many:
                order = torch.arange(len(ids))
                order[0], order[-1] = len(ids) - 1, 0
                layers = [layer[order] for layer in layers]
            case "rows and ids of two requests swapped" if many:
                order = torch.arange(len(ids))
                order[0], order[-1] = len(ids) - 1, 0
                layers, ids = [layer[order] for layer in layers], ids[order]
            case "chunk dropped" if len(steps) % 5 == 4:
                return None
            case "rows one position late":
                layers = [layer.roll(1, dims=0) for layer in layers]
            case "not finite" if len(steps) % 3 == 2:
                layers[0] = layers[0] * float("nan")
        return copy(self, writer, step, layers, ids)

    copiers.HostCopier.copy = spoiled_copy
    worker.raw_last = [None]

    def load_and_keep(self, *args, **kwargs):
        loaded = load_model(self, *args, **kwargs)
        worker.spoiled_model = self.model_runner.get_model()

        def keep(module, args):
            if len(args) == 2:  # not the fault's own use of the norm
                worker.raw_last[0] = args[0] + args[1]

        worker.spoiled_model.model.norm.register_forward_pre_hook(keep)
        return loaded

    worker.load_model = load_and_keep


def start_with_mutant(spec, channel, start=producer._start_vllm):
    install(os.environ["EAGLE3_MUTANT"])
    return start(spec, channel)


if __name__ == "__main__":
    producer._start_vllm = start_with_mutant
    sys.exit(producer.main())
