"""A prior that erases a network says so in time, and one that prunes ranks says nothing."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from prior_kit import Holder
from torch import Tensor, nn

from bayestrain.errors import CollapseWarning, ConfigError
from bayestrain.nn import TensorLinear
from bayestrain.prior import RankPrior

OUTPUTS = 360


def loop(steps: int, *, classes: int = 1, lr: float = 1e-2, **options: float) -> int | None:
    """A loop as users write it, with a loss that is a mean over 360 outputs; the step at which the prior warned."""
    torch.manual_seed(0)
    x, inner = torch.randn(1000, 20), torch.randn(20, 8) / 20**0.5
    y = (x @ inner).relu() @ torch.randn(8, OUTPUTS * classes)
    y = y.view(-1, OUTPUTS, classes).argmax(2) if classes > 1 else y + 0.1 * torch.randn(y.shape)
    first, last = TensorLinear(20, 64, max_rank=10), TensorLinear(64, OUTPUTS * classes, max_rank=10)
    model = nn.Sequential(first, nn.ReLU(), last)
    prior, optimizer = RankPrior(model, len(x), **options), torch.optim.Adam(model.parameters(), lr)
    for step in range(1, steps + 1):
        chosen = torch.randint(len(x), (50,))
        outputs = model(x[chosen])
        if classes > 1:
            loss = F.cross_entropy(outputs.view(-1, OUTPUTS, classes).movedim(2, 1), y[chosen])
        else:
            loss = F.mse_loss(outputs, y[chosen])
        (loss + prior.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            prior.step()
        if told:
            text = str(told[0].message)
            assert told[0].category is CollapseWarning
            assert told[0].filename == __file__
            assert "weight of '2'" in text or "'0', '2'" in text
            assert "1000 data with terms_per_datum=1. If the loss is a mean over outputs" in text
            return step
    return None


@pytest.mark.parametrize("classes", [1, 3], ids=["mse", "cross entropy"])
def test_a_loss_averaged_over_360_outputs_warns_within_20_steps_and_names_the_layer(classes: int) -> None:
    assert (loop(20, classes=classes, warmup_steps=0) or 99) <= 20
    assert loop(60, classes=classes, warmup_steps=0, terms_per_datum=OUTPUTS) is None


def test_it_warns_while_the_prior_warms_up() -> None:
    assert (loop(100, classes=3) or 999) <= 80
    assert loop(100, classes=3, terms_per_datum=OUTPUTS) is None


def test_terms_per_datum_divide_the_loss_and_few_data_warm_up_longer() -> None:
    model = nn.Sequential(TensorLinear(6, 4, max_rank=2))
    one, many = (RankPrior(model, 50, terms_per_datum=terms, warmup_steps=0) for terms in (1, 7))
    torch.testing.assert_close(many.loss() * 7, one.loss())
    with pytest.raises(ConfigError, match="terms_per_datum must be an integer of at least 1, got 0"):
        RankPrior(model, 50, terms_per_datum=0)
    model = nn.Sequential(TensorLinear(16, 16, max_rank=4))
    entries, steps = model[0].factorized.numel, lambda data: RankPrior(model, data).warmup_steps
    assert (steps(entries), steps(4 * entries), steps(1)) == (250, 125, 1000)
    saved = RankPrior(model, entries).state_dict()
    weight = model[0].factorized
    first, second = weight.cores
    weight.set_cores([first[..., :2], second[:2]])
    assert steps(entries) == 250  # counted at the starting ranks
    other = RankPrior(nn.Sequential(TensorLinear(16, 16, max_rank=1)), 1)
    other.load_state_dict(saved)
    assert other.warmup_steps == 250


def erase(prior: RankPrior, name: str, factor: float) -> None:
    with torch.no_grad():
        prior.model.get_submodule(name).cores[0].mul_(factor)


def watched() -> RankPrior:
    torch.manual_seed(0)
    layers = TensorLinear(8, 8, max_rank=3), nn.ReLU(), TensorLinear(8, 8, max_rank=3), nn.ReLU(), nn.Linear(8, 4)
    return RankPrior(nn.Sequential(*layers), 10, warmup_steps=0, align_every=0)


def step_to(prior: RankPrior, steps: int) -> None:
    while prior.steps < steps:
        prior.step()


def test_neither_moved_scale_nor_a_cut_is_a_loss() -> None:
    prior = watched()
    erase(prior, "0", 0.01)
    with torch.no_grad():
        prior.model[4].weight.mul_(100)
    step_to(prior, 30)
    erase(prior, "0", 0.1)
    with pytest.warns(CollapseWarning, match="weight of '0': after 40 steps"):
        step_to(prior, 40)
    erase(prior, "2", 0.01)
    step_to(prior, 60)  # once is enough
    prior = watched()
    with torch.no_grad():
        weight = prior.model[0].factorized
        weight.set_cores([1e-2 * weight.cores[0][..., :1], weight.cores[1][:1]])
        weight.rank_state.set_log_lambda(0, torch.zeros(1))
    step_to(prior, 10)
    erase(prior, "0", 0.5)
    step_to(prior, 20)
    prior.steps = 399
    erase(prior, "0", 0.3)
    prior.step()


def test_a_resumed_prior_looks_at_the_same_start() -> None:
    prior = watched()
    step_to(prior, 9)
    again = copy.deepcopy(prior)
    again._watch.start = [1e-9] * 3
    again.load_state_dict(prior.state_dict())
    erase(again, "2", 0.1)
    with pytest.warns(CollapseWarning, match="weight of '2': after 10 steps"):
        again.step()


def test_a_step_in_a_transformation_or_while_compiling_reads_nothing() -> None:
    prior = watched()
    erase(prior, "0", 0.0)
    prior.steps = 9

    def own(tensors: dict[str, Tensor]) -> Tensor:
        prior.steps = 9
        return torch.func.functional_call(Holder(prior.model, prior), tensors, ("step",))

    stacked = {f"model.{n}": t.detach()[None].repeat(2, *[1] * t.ndim) for n, t in prior.model.state_dict().items()}
    torch.vmap(own)(stacked)
    prior.steps = 9
    with pytest.warns(CollapseWarning):
        prior.step()
