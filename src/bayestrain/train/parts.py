"""Checkpoints of several processes: each writes its own particles or shards, any number of processes can read them.

`torch.distributed.checkpoint` writes and reads safetensors, which hold no code. Every particle has an entry of its own,
so another number of processes only reads other entries; shards are laid out again by PyTorch.
"""

import shutil
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bayestrain.files import checksum
from bayestrain.prior.groups import is_sharded
from bayestrain.train.distributed import shared
from bayestrain.train.subject import Network

STACKED = ("particles", "carried", "optimizer", "broken", "anchors", "numbers")
"""The entries of a posterior's state whose tensors have the particles along their first dimension, but for scalars."""


def _walk(tree: Any, visit: Callable[[tuple[str, ...], Any], Any], path: tuple[str, ...] = ()) -> Any:
    """The same tree, with what `visit` makes of every tensor and of every note of one."""
    if isinstance(tree, Tensor) or (isinstance(tree, dict) and "shape of part" in tree):
        return visit(path, tree)
    if isinstance(tree, Mapping):
        return {key: _walk(value, visit, (*path, str(key))) for key, value in tree.items()}
    if isinstance(tree, list | tuple):
        return type(tree)(_walk(value, visit, (*path, str(i))) for i, value in enumerate(tree))
    return tree


def _stacked(path: tuple[str, ...], tensor: Any) -> bool:
    """Whether it has a row per particle."""
    scalar = isinstance(tensor, Tensor) and not tensor.ndim
    return not scalar and "posterior" in path and any(name in path for name in STACKED)


def write_parts(state: dict[str, Any], subject: Network, folder: Path, epoch: int) -> dict[str, Any]:
    """Write what each process has only a part of; the state with notes in the place of these parts."""
    world, parts = subject.world, dict[str, Tensor]()
    spread = None if subject.posterior is None else subject.posterior.method.spread

    def visit(path: tuple[str, ...], tensor: Tensor) -> Any:
        name = "/".join(path)
        note = {"shape of part": list(tensor.shape), "dtype": tensor.dtype, "name": name}
        if is_sharded(tensor):
            parts[name] = tensor
            return note
        if spread is None or spread.group is None or not _stacked(path, tensor):
            return tensor
        for i, row in enumerate(tensor.detach().cpu(), start=spread.own.start):
            if world.replica == 0:
                parts[f"{name}/{i}"] = row.contiguous()
        return {**note, "shape of part": [spread.total, *tensor.shape[1:]]}

    state = _walk(state, visit)
    if not world.any(bool(parts)):
        return state
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    place = folder / f"checkpoint-{epoch}.parts"
    if world.rank == 0 and place.exists():
        shutil.rmtree(place)  # of a process that was killed
    shared(None)
    save(parts, storage_writer=HuggingFaceStorageWriter(str(place), save_distributed=True))
    shared(None)
    files = {file.name: checksum(file) for file in place.iterdir()} if world.rank == 0 else {}
    return {**state, "parts": {"folder": place.name, "files": files}}


def put_together(state: dict[str, Any], subject: Network, folder: Path) -> dict[str, Any]:
    """The state of this process: its own particles and shards, from a checkpoint of any number of processes."""
    wanted: dict[str, Tensor] = {}
    world, named = subject.world, dict(subject.template.named_parameters())
    listed = [p for group in subject.optimizer.param_groups for p in group["params"]]

    def laid_out(path: tuple[str, ...], tensor: Tensor) -> Tensor:
        """The tensor, sharded if the parameter is that it belongs to."""
        own: Any = named.get(path[-1]) if "template" in path else listed[int(path[-2])] if "optimizer" in path else None
        if own is None or not is_sharded(own) or tensor.shape != own.shape:
            return tensor
        from torch.distributed.tensor import distribute_tensor

        return distribute_tensor(tensor.to(world.device), own.device_mesh, own.placements)

    def visit(path: tuple[str, ...], tensor: Any) -> Any:
        if _stacked(path, tensor):
            if isinstance(tensor, Tensor):
                return tensor[world.particles_of(len(tensor))] if world.parts > 1 else tensor
            n, *shape = tensor["shape of part"]
            own = world.particles_of(n)
            rows = torch.empty(own.stop - own.start, *shape, dtype=tensor["dtype"])
            wanted.update({f"{tensor['name']}/{i}": row for i, row in enumerate(rows, own.start)})
            return rows
        if isinstance(tensor, Tensor):
            return laid_out(path, tensor)
        found = laid_out(path, torch.zeros(tensor["shape of part"], dtype=tensor["dtype"]))
        wanted[tensor["name"]] = found
        return found

    state = _walk(state, visit)
    if "parts" in state:
        from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader
        from torch.distributed.checkpoint.state_dict_loader import load

        reader = HuggingFaceStorageReader(str(folder / Path(str(state["parts"]["folder"])).name))
        with warnings.catch_warnings(action="ignore"):  # that there is one process
            load(wanted, storage_reader=reader, no_dist=not dist.is_initialized())
    return state
