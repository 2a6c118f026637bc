"""A model used by 8 threads gives the serial answers to rounding; a model or posterior in forked workers, the bits."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from processes import WITH_TESTS, python
from torch import Tensor, nn
from torch.utils.data import Dataset

from bayestrain import TensorizeConfig, tensorize_, to_plain

THREADS, TURNS = 8, 40


class Attention(nn.Module):
    """Keeps its class: its weights are materialised while it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.own = nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(len(x), 2, 32)
        return self.own(x, x, x)[0].flatten(1)


def network(format: str = "tt") -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 16, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(256, 64), Attention(),
                          nn.Linear(64, 5))  # fmt: skip
    tensorize_(model, TensorizeConfig(max_rank=3, format=format))
    return model.eval()


def inputs(number: int = THREADS) -> list[Tensor]:
    return [torch.randn(1 + k, 1, 4, 4, generator=torch.Generator().manual_seed(k)) for k in range(number)]


@pytest.mark.parametrize("make", [network, lambda: network("cp"), lambda: to_plain(network())])
def test_eight_threads_get_the_serial_answers_of_a_model(make: Callable[[], nn.Module]) -> None:
    with torch.no_grad():
        expected = [make()(x) for x in inputs()]
    model = make()  # whose plans and caches all threads need at the same moment
    barrier = threading.Barrier(THREADS)

    def work(number: int) -> int:
        barrier.wait()
        with torch.no_grad():
            return sum(  # PyTorch may split the first product of a thread in another way
                torch.allclose(model(inputs()[k % THREADS]), expected[k % THREADS], rtol=1e-5, atol=1e-6)
                for k in range(number, number + TURNS)
            )

    with ThreadPoolExecutor(THREADS) as pool:
        assert list(pool.map(work, range(THREADS))) == [TURNS] * THREADS


class Predictions(Dataset[Tensor]):
    """Predicts in the workers of a loader."""

    def __init__(self, model: Callable[[Tensor], Tensor], rows: list[Tensor]) -> None:
        self.model, self.rows = model, rows

    def __len__(self) -> int:
        return len(self.rows)

    @torch.no_grad()
    def __getitem__(self, index: int) -> Tensor:
        return self.model(self.rows[index])


FORK = """
import torch
from readers import posterior_fixed
from test_workers import Predictions, inputs, network
from torch.utils.data import DataLoader

torch.set_num_threads(1)
posterior = posterior_fixed()
for model, channels in (network(), 1), (lambda x: posterior.predict(x).mean, 2):
    given = Predictions(model, [x.expand(-1, channels, -1, -1) for x in inputs()])
    expected = [given[k] for k in range(len(given))]
    for workers in (1, 3):
        loader = DataLoader(given, batch_size=None, num_workers=workers, multiprocessing_context="fork")
        assert all(torch.equal(*pair) for pair in zip(loader, expected, strict=True)), workers
"""


def test_forked_workers_get_the_serial_answers() -> None:
    python("-c", FORK, env=WITH_TESTS)
