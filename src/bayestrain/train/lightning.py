"""A callback for Lightning: ``Trainer(callbacks=[RankCallback(num_data=len(train), epochs=20)])``."""

from typing import Any

from pytorch_lightning import Callback
from torch.nn.parallel import DistributedDataParallel

from bayestrain.errors import ConfigError
from bayestrain.train.guest import RankSearch


class RankCallback(Callback):  # type: ignore[misc]
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
        self.search, self.steps = RankSearch(num_data, epochs=epochs, **options), 0

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        if not pl_module.automatic_optimization:
            raise ConfigError("With manual optimisation call prior.loss(), prior.step() and compact_ in the module.")
        if (kind := type(trainer.strategy).__name__) not in ("SingleDeviceStrategy", "DDPStrategy"):
            raise ConfigError(f"Ranks are cut on one device or with strategy='ddp', not with a {kind}.")
        made = (getattr(callback, "_average_model", None) for callback in trainer.callbacks)
        self.search.averages += [average for average in made if average is not None]
        per_epoch, self.steps = trainer.num_training_batches / trainer.accumulate_grad_batches, trainer.global_step
        self.search.start(pl_module, trainer.optimizers, self.steps, per_epoch)

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        strategy = trainer.strategy
        if self.search.epoch(trainer.current_epoch) and isinstance(strategy.model, DistributedDataParallel):
            strategy.model = pl_module
            strategy.configure_ddp()

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.search.before_step()

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step > self.steps:
            self.steps = trainer.global_step
            self.search.after_step()

    def on_train_end(self, *_: Any) -> None:
        self.search.finish()
