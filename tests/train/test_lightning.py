"""The callback for Lightning: as good as `fit`, with accumulation, averages and DDP, and resumed after a kill."""

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from loops_kit import CONFIG, EPOCHS, PRIOR, SEARCH, STEPS, TRAINED, assert_as_good_as_fit, batches, network, rate
from processes import WITH_TESTS, python
from torch import nn
from torch.utils.data import DataLoader

import bayestrain as bt
from bayestrain.errors import ConfigError

pl = pytest.importorskip("pytorch_lightning")
from bayestrain.train.lightning import RankCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::pytorch_lightning.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*pytorch_lightning|.*treespec|.*LeafSpec|Checkpoint directory .* exists"),
]


class Digits(pl.LightningModule):
    """What a user writes; nothing in it is of BayesTrain."""

    def __init__(self, optimizer: Any = torch.optim.Adam) -> None:
        super().__init__()
        self.model, self.make = network(), optimizer

    def forward(self, x: torch.Tensor) -> Any:
        return self.model(x)

    def training_step(self, batch: Any, _: int) -> Any:
        x, y = batch
        return F.cross_entropy(self(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters(), CONFIG.lr)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def callback(**options: Any) -> RankCallback:
    return RankCallback(TRAINED, prior=PRIOR, **{**SEARCH, **options})


def trainer(folder: Path, *callbacks: Any, **options: Any) -> Any:
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"enable_checkpointing": any(isinstance(c, pl.callbacks.ModelCheckpoint) for c in callbacks)}
    settings = {"max_epochs": EPOCHS, "default_root_dir": folder, **quiet, **options}
    return pl.Trainer(callbacks=list(callbacks), **settings)


def loader(number: int | None = None) -> DataLoader[Any]:
    return DataLoader(batches()[:number], batch_size=None)


def test_it_reaches_what_fit_reaches(tmp_path: Path) -> None:
    module, reports = Digits(), list[Any]()
    trainer(tmp_path, callback(notify=reports.append)).fit(module, loader())
    assert_as_good_as_fit(module.model)
    assert [report.changed for report in reports].count(True) >= 3  # ranks fall while it trains
    assert all(weight.rank_state is None for weight in bt.nn.factorized_weights(module).values())


class Counted(torch.optim.Adam):
    steps = 0

    def step(self, closure: Any = None) -> Any:
        Counted.steps += 1
        return super().step(closure)


def test_the_prior_is_there_once_per_step_of_the_optimiser(tmp_path: Path) -> None:
    """With accumulated gradients, too: one step equals that of the whole batch."""
    Counted.steps, found, plain = 0, callback(compact_from=9), Digits()
    module = Digits(Counted)
    trainer(tmp_path, found, max_epochs=1, accumulate_grad_batches=4, limit_train_batches=8).fit(module, loader(8))
    assert Counted.steps == 2
    prior, optimizer = bt.RankPrior(plain, TRAINED, weight=PRIOR.weight, align_every=20, warmup_steps=2), None
    for step in range(2):
        optimizer = optimizer or torch.optim.Adam(plain.parameters())
        optimizer.param_groups[0]["lr"] = CONFIG.lr * rate(step)
        for x, y in batches()[4 * step : 4 * step + 4]:
            (F.cross_entropy(plain(x), y) / 4).backward()
        prior.loss().backward()
        optimizer.step()
        optimizer.zero_grad()
        prior.step()
    prior.remove_()
    bt.compact_(plain, CONFIG.round_tol)  # the final cut, which comes after the last epoch
    for own, expected in zip(module.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(own, expected)


def test_averages_and_ddp_follow(tmp_path: Path) -> None:
    """The averaged network predicts; DDP has the shapes of after the cut."""
    from pytorch_lightning.callbacks import EMAWeightAveraging

    averages, module = EMAWeightAveraging(decay=0.9), Digits()
    own = trainer(tmp_path, callback(epochs=3), averages, max_epochs=4, strategy="ddp", devices=1)
    own.fit(module, loader(20))
    assert bt.ranks(module) != bt.ranks(Digits())
    assert F.cross_entropy(module(batches()[0][0]), batches()[0][1]) < 1.0  # the average, which it ends with


def test_what_it_cannot_do_is_refused_before_the_first_step(tmp_path: Path) -> None:
    class Manual(Digits):
        automatic_optimization = False

    class Two(Digits):
        def configure_optimizers(self) -> Any:
            return [torch.optim.SGD(layer.parameters(), 0.1) for layer in (self.model[1], self.model[3])]

        def training_step(self, *_: Any) -> Any:
            return None

    with pytest.raises(ConfigError, match="manual optimisation call prior"):
        trainer(tmp_path, callback()).fit(Manual(), loader(2))
    with pytest.raises(ConfigError, match=r"no setting 'compact_evry'\. Did you mean"):
        callback(compact_evry=1)
    model = nn.Linear(3, 2)
    with pytest.raises(ConfigError, match="One optimiser must hold the cores"):
        callback().search.start(network(), [torch.optim.SGD(model.parameters(), 0.1)], 0, 10)
    with pytest.raises(ConfigError, match="length of an epoch"):
        callback().search.start(network(), [torch.optim.SGD(network().parameters(), 0.1)], 0, float("inf"))


SCRIPT = """
import os, signal
from pathlib import Path
import torch
torch.set_num_threads(1)
from test_lightning import *
class Kill(pl.Callback):
    def on_train_batch_start(self, trainer, module, batch, index):
        if (trainer.current_epoch, index) == (3, 7):
            os.kill(os.getpid(), signal.SIGKILL)
folder = Path({folder!r})
saved = pl.callbacks.ModelCheckpoint(folder, save_last=True)
trainer(folder, callback(), Kill(), saved).fit(Digits(), loader())
"""


def test_killed_and_resumed_it_ends_with_the_same_ranks(tmp_path: Path) -> None:
    python("-c", SCRIPT.format(folder=str(tmp_path)), status=-signal.SIGKILL, env=WITH_TESTS)
    saved = torch.load(tmp_path / "last.ckpt", weights_only=False)
    assert saved["epoch"] == 2
    assert saved["global_step"] == 3 * STEPS
    module, first = Digits(), []

    class Look(pl.Callback):
        def on_train_start(self, _: Any, module: Any) -> None:
            first.append({name: core.shape for name, core in module.named_parameters()})

    saving = pl.callbacks.ModelCheckpoint(tmp_path, save_last=True)
    resumed = trainer(tmp_path, Look(), callback(), saving)
    resumed.fit(module, loader(), ckpt_path=tmp_path / "last.ckpt", weights_only=False)
    assert first == [{name: value.shape for name, value in saved["state_dict"].items() if name in first[0]}]
    assert first[0] != {name: core.shape for name, core in Digits().named_parameters()}  # it had been cut
    assert_as_good_as_fit(module.model)
