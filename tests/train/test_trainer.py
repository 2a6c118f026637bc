"""The callback for the Trainer of transformers: as good as `fit`, resumed after a kill; and a loop with Accelerate."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import loops_kit as kit
import pytest
import torch
import torch.nn.functional as F
from fit_kit import assert_same
from processes import WITH_TESTS, python
from test_transformers import gpt2
from torch import nn
from torch.utils.data import Dataset, SequentialSampler

import bayestrain as bt
from bayestrain.errors import ConfigError

transformers = pytest.importorskip("transformers")
from bayestrain.train.trainer import RankCallback  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::bayestrain.errors.HoldWarning"),
    pytest.mark.filterwarnings("ignore:'pin_memory' argument:UserWarning"),
]


class Classifier(nn.Module):
    """What the Trainer asks for: a loss when there are labels."""

    def __init__(self) -> None:
        super().__init__()
        self.net = kit.network()

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.net(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Digits(Dataset[Any]):
    def __len__(self) -> int:
        return kit.TRAINED

    def __getitem__(self, index: int) -> Any:
        (x, y), _ = kit.digits()
        return {"x": x[index], "labels": y[index]}


class InOrder(transformers.Trainer):
    def _get_train_sampler(self, *_: Any) -> Any:
        return SequentialSampler(Digits())


def trainer(folder: Path, model: nn.Module, *callbacks: Any, data: Any = None, **options: Any) -> Any:
    settings = {"num_train_epochs": kit.EPOCHS, "per_device_train_batch_size": kit.BATCH, "max_grad_norm": 0.0,
                "report_to": []}  # fmt: skip
    settings |= {
        "save_strategy": "epoch",
        "disable_tqdm": True,
        "logging_strategy": "no",
        "use_cpu": True,
        "report_to": [],
    }
    optimizer = torch.optim.Adam(model.parameters(), kit.CONFIG.lr)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, kit.rate)
    args = transformers.TrainingArguments(folder, **{**settings, **options})
    own = {"callbacks": list(callbacks), "optimizers": (optimizer, schedule), "train_dataset": data or Digits()}
    return (InOrder if data is None else transformers.Trainer)(model, args, **own)


def callback(**options: Any) -> RankCallback:
    return RankCallback(kit.TRAINED, prior=kit.PRIOR, **{**kit.SEARCH, **options})


class Kill(transformers.TrainerCallback):
    """In the middle of an epoch."""

    def on_step_begin(self, _: Any, state: Any, *__: Any, **___: Any) -> None:
        if state.global_step == 3 * kit.STEPS + 7:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.slow
def test_killed_and_resumed_it_reaches_what_fit_reaches(tmp_path: Path) -> None:
    reports, model = list[Any](), Classifier()
    code = "import torch\ntorch.set_num_threads(1)\nfrom test_trainer import *\n"
    code += f"trainer(Path({str(tmp_path)!r}), Classifier(), callback(), Kill()).train()"
    python("-c", code, status=-signal.SIGKILL, env=WITH_TESTS)
    resumed = trainer(tmp_path, model, callback(notify=reports.append))
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == kit.EPOCHS * kit.STEPS
    assert [report.changed for report in reports].count(True) >= 2
    kit.assert_as_good_as_fit(model.net)
    last = Classifier()
    assert bt.ranks(last) != bt.ranks(model)
    trainer(tmp_path, last, callback()).train(resume_from_checkpoint=True)  # of after the search: nothing is left to do
    assert bt.ranks(last) == bt.ranks(model)


def test_a_language_model_is_cut_while_it_trains_and_its_checkpoints_load(tmp_path: Path) -> None:
    text = torch.randint(0, 50, (64, 12), generator=torch.Generator().manual_seed(0))
    rows: Any = [{"input_ids": row, "labels": row} for row in text]
    torch.manual_seed(0)
    model: Any = gpt2()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=6))
    start = bt.count_parameters(model)
    found = RankCallback(64 * 11, epochs=3, compact_from=1, compact_every=1, compact_tol=0.7, round_tol=0.7)
    options = {"num_train_epochs": 4, "per_device_train_batch_size": 8, "gradient_accumulation_steps": 2}
    trainer(tmp_path, model, found, data=rows, max_steps=-1, **options).train()
    assert bt.count_parameters(model) < start
    folders = sorted(tmp_path.glob("checkpoint-*"), key=lambda folder: int(folder.name[11:]))
    sizes = [bt.count_parameters(transformers.GPT2LMHeadModel.from_pretrained(folder)) for folder in folders]
    assert sizes[0] > sizes[1] >= sizes[2] >= sizes[3] == bt.count_parameters(model)
    with torch.no_grad():
        last = transformers.AutoModelForCausalLM.from_pretrained(folders[-1])
        assert torch.equal(last(text).logits, model.eval()(text).logits)
    assert "lambda" in json.dumps(json.loads((folders[0] / "config.json").read_text()))


def test_what_it_cannot_do_is_refused(tmp_path: Path) -> None:
    args = transformers.TrainingArguments(tmp_path, use_cpu=True, report_to=[])
    args.fp16, args.max_grad_norm = True, 0.0
    with pytest.raises(ConfigError, match="Set max_grad_norm"):
        callback().on_train_begin(args, transformers.TrainerState(), None)
    args.fsdp = "full_shard"
    with pytest.raises(ConfigError, match="use Accelerate"):
        callback().on_train_begin(args, transformers.TrainerState(), None)


@pytest.mark.parametrize("searching", [True, False])
def test_a_loop_with_accelerate_resumes(searching: bool, tmp_path: Path) -> None:
    """In the middle of the search, and after the final cut without lambda."""
    accelerate = pytest.importorskip("accelerate")

    def start() -> tuple[Any, ...]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        accelerator, model = accelerate.Accelerator(cpu=True), kit.network()
        prior, optimizer = bt.RankPrior(model, kit.TRAINED, warmup_steps=4), torch.optim.Adam(model.parameters(), 1e-2)
        model, optimizer = accelerator.prepare(model, optimizer)
        accelerator.register_for_checkpointing(prior)
        return accelerator, model, optimizer, prior

    def step(model: nn.Module, optimizer: Any, prior: bt.RankPrior) -> None:
        loss = F.cross_entropy(model(x), y)
        (loss + prior.loss() if searching else loss).backward()
        optimizer.step()
        optimizer.zero_grad()
        if searching:
            prior.step()

    (accelerator, *own), (x, y) = start(), kit.batches()[0]
    step(*own)
    bt.compact_(own[0], 0.5, rule="contribution" if searching else None, optimizer=own[1])
    if not searching:
        own[2].remove_()
    step(*own)
    accelerator.save_state(str(tmp_path))
    accelerator, *other = start()
    if not searching:
        other[2].remove_()
    accelerator.load_state(str(tmp_path))
    assert bt.ranks(other[0]) == bt.ranks(own[0]) != bt.ranks(kit.network())
    for each in (own, other):
        step(*each)
    assert_same(*(each[0] for each in (own, other)))
