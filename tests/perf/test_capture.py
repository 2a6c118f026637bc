"""Which optimisers' steps can be captured. What a GPU does with a recording is in test_cuda.py."""

import torch

from bayestrain.perf import capture


def test_only_rates_on_a_gpu_can_be_captured() -> None:
    weight = [torch.zeros(2, requires_grad=True)]
    assert not capture.can_capture(torch.optim.Adam(weight, 0.1))
    assert not capture.can_capture(torch.optim.Adam(weight, torch.tensor(0.1), capturable=True))
    assert not capture.can_capture(torch.optim.SGD(weight, torch.tensor(0.1), fused=True))
