"""Settings shared by all tests: one thread, a fixed seed, and property tests that draw the same examples every time."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator

import pytest
import torch
from hypothesis import HealthCheck, settings

pytest.register_assert_rewrite("layer_kit")

torch.set_num_threads(1)

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # a shell in the background starts it so, and children inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile(
    "bayestrain",
    deadline=None,  # the first call of an operation may be slow
    derandomize=True,
    max_examples=50,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("bayestrain")


LONGEST = (
    "test_readme_commands",
    "test_resume",
    "test_report_kinds",
    "test_example",
    "test_report_browser",
    "test_cli_train",
)
"""Files that take minutes. They come first, so that no worker has one left when the others are done."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    def place(item: pytest.Item) -> int:
        return LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST)

    items.sort(key=place)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def process_group() -> Iterator[None]:
    """A real process group of one process over the loopback device."""
    with pytest.MonkeyPatch.context() as patch:
        if sys.platform == "linux":  # else gloo asks for the host's name, which need not resolve
            patch.setenv("GLOO_SOCKET_IFNAME", "lo")
        torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
        yield
        torch.distributed.destroy_process_group()
