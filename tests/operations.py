"""What operations PyTorch runs, and how large the tensors are that they make."""

from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Operations(TorchDispatchMode):
    """The names of the operations that run inside of it, the sizes of what they make, and those of its storage."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()
        self.entries: set[int] = set()
        self.stored: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.__name__)
        made = func(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, tuple | list) else [made]:
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.entries.add(tensor.numel())
                self.stored.add(tensor.untyped_storage().nbytes() // tensor.element_size())
        return made
