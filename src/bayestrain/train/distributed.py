"""One run in several processes that `torchrun` started: who does what.

`World` arranges the processes in a mesh of particles x data: those along "data" have the same particles and share each
batch, those along "particles" have different particles. One network has all of them along "data". What is decided from
values (cuts, the order of the data, stopping) is decided by process 0, or from sums that are the same bits everywhere.
"""

import atexit
import gc
import hashlib
import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel

import bayestrain
from bayestrain.compact import CompactReport
from bayestrain.errors import BayesTrainError, ConfigError, TrainingError
from bayestrain.infer import Spread
from bayestrain.nn import factorized_weights
from bayestrain.prior.groups import is_sharded, whole
from bayestrain.train.config import shown

TIMEOUT = "BAYESTRAIN_TIMEOUT"  # environment variable: seconds that a process waits for the others
FEWEST_ROWS = 8  # of parameters that are sharded: DTensor cannot give a row to every process
LAST_WORDS = 10.0  # seconds that process 0 has to report what went wrong in another one, before torchrun stops it


def rank() -> int:
    """The number of this process; 0 outside of `torchrun`."""
    return dist.get_rank() if dist.is_initialized() else int(os.environ.get("RANK", 0))


def shared(value: Any) -> Any:
    """The value that process 0 has."""
    if not dist.is_initialized():
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def own_device(device: torch.device) -> torch.device:
    """The GPU of this process, where the processes of a machine have several."""
    if device.type == "cuda" and device.index is None and "LOCAL_RANK" in os.environ:
        return torch.device("cuda", int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
    return device


def join(device: torch.device) -> None:
    """Join the other processes, if `torchrun` started several and the script has not joined them."""
    if dist.is_initialized() or int(os.environ.get("WORLD_SIZE", 1)) == 1:
        return
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Two processes on one GPU can only use gloo.
    alone = device.type == "cuda" and int(os.environ.get("LOCAL_WORLD_SIZE", 1)) <= torch.cuda.device_count()
    seconds = float(os.environ.get(TIMEOUT, 600))
    try:
        wait, backend = timedelta(seconds=seconds), "cpu:gloo,cuda:nccl" if alone else "gloo"
        store, number, size = next(rendezvous("env://", timeout=wait))
        # On one node torchrun keeps the store when it restarts workers, with the addresses of those that have ended.
        if os.environ.get("LOCAL_WORLD_SIZE") == str(size):
            store = PrefixStore(f"attempt {os.environ.get('TORCHELASTIC_RESTART_COUNT')}", store)
        dist.init_process_group(backend, store=store, rank=number, world_size=size, timeout=wait)
    except (dist.DistError, RuntimeError, ValueError) as error:
        where = ":".join(os.environ.get(name, "?") for name in ("MASTER_ADDR", "MASTER_PORT"))
        raise ConfigError(
            f"Process {os.environ.get('RANK', '?')} of {os.environ['WORLD_SIZE']} has not met the others at {where} "
            f"within {seconds:g} s ({TIMEOUT}): {str(error).partition(chr(10))[0]} Start all of them with torchrun, on "
            "every node with the same --rdzv-endpoint, or unset WORLD_SIZE."
        ) from error
    atexit.register(_leave)


def _leave() -> None:
    if dist.is_initialized():
        gc.collect()  # wrappers hold on to the group, whose threads must end before the process does
        dist.destroy_process_group()


class World:
    """The processes of a run; alone, one process that has all particles and all data.

    Args:
        particles: of all processes.
        replicas: processes that have the same particles and share the batches.
        alone: whatever others there are.
    """

    def __init__(self, device: torch.device, particles: int = 1, replicas: int = 1, *, alone: bool = False) -> None:
        self.device, self.size, self.rank = device, 1, 0
        if not alone:
            join(device)
            self.size, self.rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        self.parts, self.part, self.replicas, self.replica = 1, 0, self.size, self.rank
        self._data: Any = None
        self.own, self._particles = slice(0, particles), None
        if self.size == 1 or particles == 1:
            return
        if self.size % replicas or self.size // replicas > particles:
            raise ConfigError(
                f"{self.size} processes with posterior.replicas {replicas} do not go with {particles} particles: every "
                f"{replicas} need one of their own. Start fewer processes, or choose replicas that divide their number."
            )
        self.parts, self.replicas = self.size // replicas, replicas
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (self.parts, replicas), mesh_dim_names=("particles", "data"))
        self._particles, self._data = mesh.get_group("particles"), mesh.get_group("data")
        self.part, self.replica = mesh.get_local_rank("particles"), mesh.get_local_rank("data")
        self.own = self.particles_of(particles)

    def particles_of(self, total: int) -> slice:
        return slice(total * self.part // self.parts, total * (self.part + 1) // self.parts)

    def spread(self, own: int) -> Spread:
        """How the particles are spread, of which this process has so many."""
        return Spread(own, self._particles, self.device)

    def sum_data(self, tensor: Tensor) -> Tensor:
        """The sum over the processes that share a batch, in place."""
        if self.replicas > 1:
            dist.all_reduce(tensor, group=self._data)
        return tensor

    def sum_all(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, true: bool) -> bool:
        return bool(self.sum_all(torch.tensor(float(true))))

    def sum_many(self, tensors: Sequence[Tensor]) -> None:
        """The same for many tensors in one call, each in place."""
        flat = self.sum_data(torch.cat([tensor.reshape(-1) for tensor in tensors]))
        for tensor, part in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
            tensor.copy_(part.view_as(tensor))

    def wrap(self, module: nn.Module) -> nn.Module:
        """The module, whose gradients become means over the processes; buffers are those of process 0."""
        own = [p for p in module.parameters() if p.requires_grad]
        if self.size == 1 or not own or any(is_sharded(p) for p in own):
            return module
        return DistributedDataParallel(module)

    def shard_(self, model: nn.Module, likelihood: nn.Module) -> None:
        """Shard the dense parameters with `fully_shard`; every process keeps cores and other small ones whole.

        The units that are put together for a pass are the elements of lists and sequences of modules.
        """
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        self.copy_(t for module in (model, likelihood) for t in (*module.parameters(), *module.buffers()))
        kept = {core for weight in factorized_weights(model).values() for core in weight.cores}
        kept |= {p for p in model.parameters() if p.ndim < 2 or len(p) < max(FEWEST_ROWS, self.size)}
        units: list[nn.Module] = []
        for module in model.modules():
            if isinstance(module, nn.Sequential | nn.ModuleList):
                inside = {each for unit in units for each in unit.modules()}
                units += [child for child in module if child not in inside]
        mesh = init_device_mesh(self.device.type, (self.size,))
        for unit in units:
            if not isinstance(unit, nn.ModuleList | nn.ModuleDict) and set(unit.parameters()) - kept:
                fully_shard(unit, mesh=mesh, ignored_params=kept)
        fully_shard(model, mesh=mesh, ignored_params=kept, reshard_after_forward=True)
        for p in (*kept, *likelihood.parameters()):
            if p.requires_grad:
                p.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        """Make the gradient the mean over processes; what is the mean already stays as it is."""
        if parameter.grad is not None:
            dist.all_reduce(parameter.grad)
            parameter.grad /= self.size

    def copy_(self, tensors: Iterable[Tensor]) -> None:
        """Give all processes the values of process 0."""
        if self.size > 1:
            for work in [dist.broadcast(tensor.detach(), src=0, async_op=True) for tensor in tensors]:
                work.wait()

    def cut(self, report: CompactReport | None, model: nn.Module, optimizer: torch.optim.Optimizer) -> CompactReport:
        """Take over the cut that process 0 has made: ranks, cores, lambda, the optimiser's state, and its report."""
        if self.size == 1:
            assert report is not None
            return report
        weights, state = factorized_weights(model).values(), optimizer.state
        cut = [(w.state_dict(), w.compacted, [state.get(core, {}) for core in w.cores]) for w in weights]
        report, cut = shared((report, cut))
        if self.rank == 0:
            return report
        for weight, (own, compacted, states) in zip(weights, cut, strict=True):
            weight.load_state_dict(own)
            weight.compacted = compacted
            for core, moments in zip(weight.cores, states, strict=True):
                state.pop(core, None)
                if moments:
                    state[core] = {k: v.to(core.device) if torch.is_tensor(v) and v.ndim else v
                                   for k, v in moments.items()}  # fmt: skip
        return report

    def agree(self, settings: Mapping[str, Any]) -> None:
        """Raise on all processes unless all have the same settings, versions and code."""
        if self.size == 1:
            return
        mine = {**settings, "BayesTrain": bayestrain.__version__, "PyTorch": torch.__version__, "code": _code()}
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine)
        for number, other in enumerate(found):
            for key in {**found[0], **other}:
                if (ours := found[0].get(key)) != (theirs := other.get(key)):
                    raise ConfigError(
                        f"All processes must do the same, but {key} is {shown(ours)} in process 0 and {shown(theirs)} "
                        f"in process {number}. Start all of them with the same command, config and code."
                    )


@contextmanager
def reporting() -> Iterator[None]:
    """Of an error in another process, process 0 says which one it was in, before `torchrun` stops it."""
    try:
        yield
    except Exception as error:
        if not dist.is_initialized() or dist.get_world_size() == 1:
            raise
        store: Any = dist.distributed_c10d._get_default_store()
        if number := dist.get_rank():
            store.set("failed", f"Process {number} of {dist.get_world_size()} failed: {type(error).__name__}: {error}")
            dist.destroy_process_group()  # wakes process 0, if it waits for this one
            time.sleep(LAST_WORDS)
        elif not isinstance(error, BayesTrainError):
            deadline = time.monotonic() + LAST_WORDS / 2
            while time.monotonic() < deadline and not store.check(["failed"]):
                time.sleep(0.1)
            if store.check(["failed"]):
                raise TrainingError(store.get("failed").decode()) from error
        raise


def whole_state(model: nn.Module) -> dict[str, Tensor] | None:
    """The state of a network that is sharded, put together on the CPU of every process; None of any other."""
    if not any(is_sharded(p) for p in model.parameters()):
        return None
    return {name: whole(tensor).cpu() for name, tensor in model.state_dict().items()}


def _code() -> str:
    found, here = hashlib.sha256(), Path(bayestrain.__file__).parent
    for file in sorted(here.rglob("*.py")):
        found.update(file.relative_to(here).as_posix().encode() + file.read_bytes())
    return found.hexdigest()[:12]
