"""Shows what is supervised before the first step: preview.html in the run's directory, a table in W&B."""

from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from eagle3_lightning.checks import NOT_NEGATIVE, check_number
from eagle3_lightning.loggers import wandb_loggers, wandb_may_fail
from eagle3_lightning.prompts.preview import COLUMNS, Preview, to_html, to_table


class PreviewCallback(Callback):
    """Decodes the first samples that this run trains on."""

    def __init__(self, run_dir: Path | None = None, num_samples: int = 8) -> None:
        """Say how much to show.

        Args:
            run_dir: preview.html is written there; None writes none.
            num_samples: samples to show; 0 shows none.

        Raises:
            ConfigError: a number that makes no sense.
        """
        super().__init__()
        check_number("preview.num_samples", num_samples, NOT_NEGATIVE, 8)
        self.run_dir, self.num_samples = run_dir, num_samples

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Called once, before the first step."""
        if not self.num_samples or not trainer.is_global_zero:
            return
        previews: list[Preview] = trainer.datamodule.preview(self.num_samples)  # type: ignore[attr-defined]
        if self.run_dir is not None:
            self.run_dir.mkdir(parents=True, exist_ok=True)
            (self.run_dir / "preview.html").write_text(to_html(previews), encoding="utf-8")
        for logger in wandb_loggers(trainer):
            with wandb_may_fail("the preview"):  # a table is an artifact, of which W&B asks its server
                logger.log_table("data/preview", columns=COLUMNS, data=to_table(previews))
