"""`eagle3 plan`: does a run fit, and how long will it take? Takes every option of `eagle3 fit`."""

import json
from collections.abc import Sequence
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.cli import LightningArgumentParser

from eagle3_lightning.plan.build import Plan, make_plan
from eagle3_lightning.plan.run import PlanOptions, read_run
from eagle3_lightning.plan.text import as_dict, as_text
from eagle3_lightning.run_directory import RunLock
from eagle3_lightning.trainer_cli import Eagle3CLI, make_cli

DOES_NOT_FIT = 1


def main(argv: Sequence[str]) -> int:
    """Run `eagle3 plan ...`; exit code 1 if something does not fit."""
    cli = make_cli(_PlanCLI, argv, RunLock(), _PlannedTrainer)  # the lock is not taken
    plan = planned(cli.config.plan)
    print(json.dumps(as_dict(plan), indent=2) if cli.config.plan.json else as_text(plan))
    return 0 if plan.fits else DOES_NOT_FIT


def planned(config: Any) -> Plan:
    """The plan of parsed options."""
    return make_plan(read_run(config), PlanOptions(**config.plan.as_dict()))


class _PlannedTrainer(Trainer):
    """The trainer's options; none is made."""

    plan = Trainer.fit


class _PlanCLI(Eagle3CLI):
    """Parses what `eagle3 fit` would, and makes nothing of it."""

    @staticmethod
    def subcommands() -> dict[str, set[str]]:
        """One command with the arguments of `fit`."""
        return {"plan": Eagle3CLI.subcommands()["fit"]}

    def init_parser(self, **kwargs: Any) -> LightningArgumentParser:
        """Describe the command, not the method that lends it its arguments."""
        text = "Says whether a fit with these options fits, and how long it will take; nothing is started."
        return super().init_parser(**{**kwargs, "description": text})

    def add_arguments_to_parser(self, parser: LightningArgumentParser) -> None:
        """Add the plan's own group."""
        super().add_arguments_to_parser(parser)
        parser.add_class_arguments(PlanOptions, "plan")
        parser.add_argument("--json", action="store_true", help="print the plan as JSON")

    def _set_seed(self) -> None:
        """Nothing is drawn."""

    def before_instantiate_classes(self) -> None:
        """Nothing is checked that a plan can do without: prompts and the run's directory."""

    def instantiate_classes(self) -> None:
        """Nothing is made."""

    def after_instantiate_classes(self) -> None:
        """Nothing was made."""

    def _run_subcommand(self, subcommand: str) -> None:
        """Nothing is run."""
