"""Settings shared by all tests: one thread, a fixed seed, and property tests that draw the same examples every time."""

import os
import signal
from collections.abc import Iterator

import pytest
import torch

try:  # a GPU machine may have nothing but torch and pytest
    from hypothesis import HealthCheck, settings
except ImportError:
    settings = None

torch.set_num_threads(1)

if not torch.cuda.is_available():  # before Triton is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell starts background jobs so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

if settings is not None:
    settings.register_profile(
        "bayestrain",
        deadline=None,  # the first call of an operation may be slow
        derandomize=True,
        max_examples=50,
        suppress_health_check=[HealthCheck.too_slow],
    )
    settings.load_profile("bayestrain")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """Loops of other libraries join a group of processes and set variables, which later tests must not see."""
    before = dict(os.environ)
    yield
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    if os.environ != before:
        os.environ.clear()
        os.environ.update(before)
