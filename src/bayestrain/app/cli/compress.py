"""`bayestrain compress`: trained weights in, a folder with a smaller model out, without training."""

from collections.abc import Iterable
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from bayestrain.app.cli.runs import DEVICE, resolve_device
from bayestrain.app.cli.train import option
from bayestrain.errors import ConfigError, DataError

if TYPE_CHECKING:
    from torch import nn

WHAT, GOAL, WHERE = "What to compress", "How far (give one)", "Where"


def compress(
    model: Annotated[str, option(WHAT, "--model", "PKG.MOD:BUILD", "Function that builds the network, or a folder of "
                                 "the transformers library.")],
    out: Annotated[Path, option(WHERE, "--out", "DIR", "Folder for the smaller model.")],
    weights: Annotated[Path | None, option(WHAT, "--weights", "FILE", "Its trained weights: .safetensors, or a state "
                                           "dict in a .pt, .pth or .th file.")] = None,
    data: Annotated[str, option(WHAT, "--data", "PKG.MOD:LOADER", "Function that returns calibration batches.")] = "",
    ratio: Annotated[float | None, option(GOAL, "--ratio", "X", "How many times smaller.")] = None,
    parameters: Annotated[int | None, option(GOAL, "--parameters", "N", "How many parameters at most.")] = None,
    tolerance: Annotated[float | None, option(GOAL, "--tolerance", "E", "Largest relative change of a layer.")] = None,
    batches: Annotated[int, option(WHAT, "--batches", "N", "Batches of the data that are used. Default: 8")] = 8,
    device: Annotated[str, option(WHERE, "--device", "DEVICE", DEVICE)] = "auto",
) -> None:  # fmt: skip
    """Make a trained network smaller, without training, and save it as `bayestrain.save` does.

    ```sh
    bayestrain compress --model nets:build --weights w.safetensors --ratio 4 --data nets:loader --out small
    bayestrain compress --model ./my-gpt2 --ratio 2 --out small
    ```
    """
    if (out / "model.json").exists():
        raise ConfigError(f"{out} already holds a model. Choose another --out.")
    place = resolve_device(device)
    if weights is not None:
        network = mapped(model, weights) or load_weights(build(model), weights)
    elif Path(model).is_dir():
        network = build(model)
    else:
        raise ConfigError("--weights names the trained weights of the network. It may be left out for a folder only.")
    from bayestrain.compress import compress_
    from bayestrain.io import save
    from bayestrain.train.run import made

    calibration: Any = None
    if data:
        if not isinstance(found := made(data), Iterable):
            raise ConfigError(f"--data {data} must return batches, as a DataLoader does, got a {type(found).__name__}.")
        calibration = list(islice(found, batches))
    goal = {"ratio": ratio, "parameters": parameters, "tolerance": tolerance}
    print(compress_(network.to(place).eval(), calibration=calibration, **goal))  # type: ignore[arg-type]
    save(network, out)
    print(f"Saved in {out}. Read it with bayestrain.load({str(out)!r}, into=the network).")


def build(name: str) -> "nn.Module":
    """The network that a function builds, or that a folder of transformers holds."""
    if Path(name).is_dir():
        try:
            from transformers import AutoModel, AutoModelForCausalLM
        except ImportError:
            raise ConfigError(f"To read the folder {name}, install transformers: pip install transformers") from None
        try:
            return AutoModelForCausalLM.from_pretrained(name, local_files_only=True)  # type: ignore[no-any-return]
        except ValueError:  # not a language model
            return AutoModel.from_pretrained(name, local_files_only=True)  # type: ignore[no-any-return]
    from bayestrain.train.run import built

    return built(name)


def mapped(name: str, file: Path) -> "nn.Module | None":
    """A network whose tensors stay on disk until they are read: it may be larger than memory. None if it cannot be."""
    import torch

    if file.suffix != ".safetensors" or Path(name).is_dir():
        return None
    try:
        with torch.device("meta"):
            network = build(name)
    except (NotImplementedError, RuntimeError):  # it computes with its weights
        return None
    if len(dict(network.named_parameters())) < len(dict(network.named_parameters(remove_duplicate=False))):
        return None  # a weight under two names would be read twice
    dtypes = [tensor.dtype for tensor in network.state_dict().values()]
    load_weights(network, file, assign=True)
    tensors = (*network.parameters(), *network.buffers())  # buffers that are not saved were never computed
    same = dtypes == [tensor.dtype for tensor in network.state_dict().values()]
    return network if same and not any(tensor.is_meta for tensor in tensors) else None


def load_weights(network: "nn.Module", file: Path, assign: bool = False) -> "nn.Module":
    """Read a state dict, perhaps in a checkpoint or from DataParallel, into a network, without running code from it."""
    import torch
    from safetensors.torch import load_file

    try:
        found: Any = load_file(file) if file.suffix == ".safetensors" else torch.load(file, "cpu", weights_only=True)
    except Exception as error:  # PyTorch raises anything on damage
        raise DataError(f"{file} cannot be read as weights: {error}") from error
    for key in ("state_dict", "model"):
        if isinstance(found, dict) and isinstance(found.get(key), dict):
            found = found[key]
    if not isinstance(found, dict) or not all(isinstance(each, torch.Tensor) for each in found.values()):
        raise DataError(f"{file} holds no state dict: names with tensors. Save model.state_dict().")
    if all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    try:
        network.load_state_dict(found, assign=assign)
    except RuntimeError as error:
        raise DataError(f"The weights in {file} are not those of the network: {error}") from error
    return network
