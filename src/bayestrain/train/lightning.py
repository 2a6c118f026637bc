"""A callback for Lightning: ``Trainer(callbacks=[RankCallback(num_data=len(train), epochs=20)])``."""

from typing import Any

from pytorch_lightning import Callback, LightningModule, Trainer
from torch.nn.parallel import DistributedDataParallel

from bayestrain.errors import ConfigError
from bayestrain.train.guest import RankSearch


class RankCallback(Callback):
    """Finds ranks while Lightning trains: the prior, cuts between epochs, and the final cut.

    The module's own loss must be a mean over data. Gradients may be accumulated, and clipped with the prior's. After
    cuts, the optimiser's state, `DistributedDataParallel` and the averages of `WeightAveraging` follow.

    Args:
        num_data: how many terms the loss is a mean over, as of `RankPrior`.
        epochs: of the search. The final cut comes after them, and what the trainer does beyond is fine-tuning.
        options: `prior`, a `PriorConfig`; `averages`, models that hold averages of weights; `notify`, a function of
            the report of each cut; and the settings of `FitConfig` that say when and how far to cut.
    """

    def __init__(self, num_data: int, *, epochs: int, **options: Any) -> None:
        self.search, self._steps = RankSearch(num_data, epochs=epochs, **options), 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not pl_module.automatic_optimization:
            raise ConfigError(
                "Manual optimisation takes prior.loss(), prior.step() and compact_ as a loop of your own."
            )
        if (kind := type(trainer.strategy).__name__) not in ("SingleDeviceStrategy", "DDPStrategy"):
            raise ConfigError(
                f"Ranks are cut on one device or with strategy='ddp', got a {kind}, which shards weights."
            )
        made = (getattr(callback, "_average_model", None) for callback in trainer.callbacks)  # type: ignore[attr-defined]
        self.search.averages += [average for average in made if average is not None]
        per_epoch = trainer.num_training_batches / trainer.accumulate_grad_batches
        self._steps = trainer.global_step
        self.search.start(pl_module, trainer.optimizers, self._steps, per_epoch)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy: Any = trainer.strategy
        if self.search.epoch(trainer.current_epoch) and isinstance(strategy.model, DistributedDataParallel):
            strategy.model = pl_module
            strategy.configure_ddp()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.search.before_step()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step > self._steps:
            self._steps = trainer.global_step
            self.search.after_step()

    def on_train_end(self, *_: Any) -> None:
        self.search.finish()
