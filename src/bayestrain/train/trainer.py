"""A callback for the Trainer of `transformers`: ``Trainer(.., callbacks=[RankCallback(num_data=.., epochs=20)])``."""

from typing import Any

from transformers import TrainerCallback

from bayestrain.errors import ConfigError
from bayestrain.train.guest import RankSearch


class RankCallback(TrainerCallback):  # type: ignore[misc]
    """Finds ranks while the Trainer trains: the prior, cuts between epochs, and the final cut.

    The arguments are those of the callback for Lightning. The Trainer clips gradients before the prior's are added.
    """

    def __init__(self, num_data: int, *, epochs: int, **options: Any) -> None:
        self.search = RankSearch(num_data, epochs=epochs, **options)

    def on_train_begin(self, args: Any, state: Any, *_: Any, **objects: Any) -> None:
        if args.world_size > 1 or args.deepspeed or args.fsdp:
            raise ConfigError("The Trainer keeps a wrapper with the old shapes. On several devices use Accelerate.")
        if args.fp16 and not args.max_grad_norm:
            raise ConfigError("Without clipping, gradients of fp16 are scaled. Set max_grad_norm, or use bf16=True.")
        per_epoch = state.max_steps / max(state.num_train_epochs, 1)
        self.search.start(objects["model"], [objects["optimizer"]], state.global_step, per_epoch)

    def on_epoch_begin(self, args: Any, state: Any, *_: Any, **__: Any) -> None:  # noqa: ARG002
        self.search.epoch(int(state.epoch or 0))

    def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.search.before_step()

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.search.after_step()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        self.search.finish()
