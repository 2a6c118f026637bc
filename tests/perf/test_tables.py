"""The prior of many weights at once is the readable one, whatever types they have or get."""

import pytest
import torch
from torch import nn

from bayestrain import RankPrior
from bayestrain.nn import TensorLinear
from bayestrain.nn.fast import fast
from bayestrain.perf.tables import FEW, Tables
from bayestrain.prior.density import newton_step
from bayestrain.prior.groups import Group

pytestmark = pytest.mark.skipif(fast() is None, reason="perf is switched off")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(TensorLinear(8, 8, max_rank=2 + k % 3) for k in range(FEW + 1)))


def same_as_readable(tables: Tables) -> None:
    readable = Group(tables.weights, tables.held)
    torch.testing.assert_close(tables.log_prob(1.0), readable.log_prob(1.0), check_dtype=False)
    found = []
    for group in (tables, readable):
        for weight in group.weights.values():
            for u in weight.rank_state.log_lambdas:
                u.fill_(0.5)
        group.move_(newton_step, sweeps=2)
        found.append([u.clone() for weight in group.weights.values() for u in weight.rank_state.log_lambdas])
    torch.testing.assert_close(*found)


def test_weights_of_another_type_than_the_first_are_left_to_the_readable_group() -> None:
    model = network()
    model.append(TensorLinear(8, 8, dtype=torch.float64))
    tables, rest = RankPrior(model, 10).groups
    assert (type(tables), list(tables.weights)) == (Tables, [str(k) for k in range(FEW + 1)])
    assert (type(rest), list(rest.weights)) == (Group, [str(FEW + 1)])
    same_as_readable(tables)


def test_tables_follow_types_that_change_later() -> None:
    model = network()
    (tables,) = RankPrior(model, 10).groups
    same_as_readable(tables)
    model[1].double()
    same_as_readable(tables)
    model.double()
    same_as_readable(tables)
