"""Models of the `transformers` library: ``save_pretrained`` and ``from_pretrained`` at the ranks that were learned.

``config.json`` describes the factorised weights as a quantisation method, which `transformers` asks for the layers to
load into. It also names no file of weights that exists until this module corrects it: without BayesTrain, loading ends
in an error instead of random dense layers. Imports nothing heavy until `transformers` loads its models.
"""

import importlib.util
import json
import sys
from collections.abc import Mapping
from functools import wraps
from importlib import import_module
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

METHOD, VERSION, MODELS = "bayestrain", 1, "transformers.modeling_utils"

REFUSAL = "This model has factorised layers. Run `import bayestrain` before loading it: pip install bayestrain"
"""In the place of the name of the file with the weights, which `transformers` shows when it refuses it."""


class Watch:
    """Among Python's importers: calls `register` when `transformers` has loaded its models."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:  # noqa: ARG002
        if name != MODELS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def exec_module(module: ModuleType) -> None:
                execute(module)
                register(module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def watch() -> None:
    """Register with `transformers` now, or when it is imported."""
    if MODELS in sys.modules:
        register(sys.modules[MODELS])
    else:
        sys.meta_path.insert(0, Watch())


def register(models: Any) -> None:
    """Teach `transformers` to save and load factorised weights."""
    auto: Any = import_module("transformers.quantizers.auto")
    if METHOD in auto.AUTO_QUANTIZER_MAPPING:
        return
    base: Any = import_module("transformers.utils.quantization_config").QuantizationConfigMixin

    class FactorizedConfig(base):  # type: ignore[misc]
        """What ``config.json`` says about the factorised weights."""

        def __init__(self, weights: Any = None, version: Any = None, **_: Any) -> None:
            self.quant_method, self.version, self.weights = METHOD, version, weights

    class FactorizedLoader(auto.HfQuantizer):  # type: ignore[misc]
        """Puts factorised layers in place before the weights are read, and then leaves an ordinary model."""

        requires_calibration, is_trainable = True, True

        def is_serializable(self) -> bool:
            return True

        def update_attn_implementation(self, config: Any) -> Any:
            vars(config).pop("transformers_weights", None)  # the first time that the method sees the config
            return config

        def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
            about = self.quantization_config
            self.once = prepare_(model, about.weights, about.version)

        def postprocess_model(self, model: Any, **_: Any) -> None:
            self.once.remove()
            tie_(model)
            for weight in _weights(model).values():
                if weight.rank_state is not None:
                    weight.rank_state.start = tuple(weight.rank_state.start_ranks.tolist())
            self.remove_quantization_config(model)

    auto.register_quantization_config(METHOD)(FactorizedConfig)
    auto.register_quantizer(METHOD)(FactorizedLoader)
    kind: Any = models.PreTrainedModel
    save, resize = kind.save_pretrained, kind.resize_token_embeddings

    @wraps(save)
    def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
        config, weights = self.config, describe(self) if _weights_loaded() else {}
        if not weights:
            return save(self, *args, **kwargs)
        if getattr(config, "quantization_config", None) is not None:
            from bayestrain.errors import ConfigError

            raise ConfigError("The model is quantised, too. Save it with bayestrain.save(model, folder) instead.")
        tie_(self)

        def save_config(folder: Any, **options: Any) -> None:
            del vars(config)["save_pretrained"]
            config.save_pretrained(folder, **options)
            note = {"quantization_config": {"quant_method": METHOD, "version": VERSION, "weights": weights}}
            file = Path(folder) / "config.json"
            content = json.loads(file.read_text(encoding="utf-8")) | note | {"transformers_weights": REFUSAL}
            file.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")

        vars(config)["save_pretrained"] = save_config  # once: `save` has no other place to add to the file
        try:
            return save(self, *args, **kwargs)
        finally:
            vars(config).pop("save_pretrained", None)

    @wraps(resize)
    def resize_token_embeddings(self: Any, new_num_tokens: Any = None, *args: Any, **kwargs: Any) -> Any:
        if _weights_loaded() and (new_num_tokens or args or kwargs):
            check_resize(self)
        return resize(self, new_num_tokens, *args, **kwargs)

    kind.save_pretrained, kind.resize_token_embeddings = save_pretrained, resize_token_embeddings


def _weights_loaded() -> bool:
    """Whether there can be factorised weights at all; other models do not wait for BayesTrain's imports."""
    return "bayestrain.nn.factorized" in sys.modules


def _weights(model: "nn.Module") -> dict[str, Any]:
    from bayestrain.nn.factorized import FactorizedWeight

    return {path: module for path, module in model.named_modules() if isinstance(module, FactorizedWeight)}


def describe(model: "nn.Module") -> dict[str, Any]:
    """The factorised weights of a model, as JSON holds them."""
    from bayestrain.io import LAYOUT

    found = {}
    for path, weight in _weights(model).items():
        layout = {key: getattr(weight.layout, key) for key in ("name", *LAYOUT)}
        found[path] = {"format": weight.format.name, "equation": str(weight.equation), "layout": layout}
        found[path] |= {"ranks": weight.ranks, "lambda": weight.rank_state is not None}
    return found


def prepare_(model: Any, weights: Any, version: Any) -> Any:
    """Give a model without values the factorised weights of a description, where it has their layers.

    Until the handle that is returned is removed, its ``state_dict`` has what layers share once, as the files do.
    """
    import torch

    from bayestrain.errors import DataError
    from bayestrain.formats import get
    from bayestrain.io import LAYOUT, _built, _sizes
    from bayestrain.nn.convert import install
    from bayestrain.nn.layout import Layout

    modules, prefix = dict(model.named_modules()), model.base_model_prefix
    known, tensors = dict[str, Any](), dict[str, Any]()
    try:
        if version != VERSION or not isinstance(weights, Mapping):
            raise ValueError(f"its version is {version!r}")
        for path, about in weights.items():
            names = (path, f"{prefix}.{path}", path.removeprefix(f"{prefix}."))  # of a head on a base model, or without
            name = next((name for name in names if name.partition(".factorized")[0] in modules), None)
            if name is not None:
                sizes = {key: _sizes(about["layout"][key]) for key in LAYOUT}
                layout = Layout(**sizes, name=str(about["layout"]["name"]))
                shapes = get(about["format"]).equation(layout.sizes).shapes(layout.sizes, _sizes(about["ranks"]))
                tensors |= {f"{name}.cores.{k}": torch.empty(s, device="meta") for k, s in enumerate(shapes)}
                known[name] = about | {"layout": layout}
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise DataError(f"config.json describes no factorised weights of version {VERSION}: {error!r}.") from error
    for target, source in model.all_tied_weights_keys.items():  # which the library ties after loading only
        owner, _, key = target.rpartition(".")
        setattr(model.get_submodule(owner), key, model.get_parameter(source))
    _, places, _ = _built(Path("config.json"), {"weights": known}, model, tensors)
    install(model, places)
    for path, about in known.items():
        if about.get("lambda"):
            model.get_submodule(path).attach_rank_state()
    model.all_tied_weights_keys, tied = ties(model)

    def leave_out(_: Any, state: dict[str, Any], *__: Any) -> None:
        for name in tied.keys() & state.keys():
            del state[name]

    return model.register_state_dict_post_hook(leave_out)


def ties(model: Any) -> tuple[dict[str, str], dict[str, str]]:
    """What is tied to what: parameters that the library knows and that still exist, and factorised tensors."""
    from bayestrain.nn.factorized import FactorizedWeight

    first, tied = dict[FactorizedWeight, str](), dict[str, str]()
    for path, weight in model.named_modules(remove_duplicate=False):
        if isinstance(weight, FactorizedWeight) and (source := first.setdefault(weight, path)) != path:
            tied |= {f"{path}.{name}": f"{source}.{name}" for name in weight.state_dict()}
    there = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    return {t: source for t, source in model.all_tied_weights_keys.items() if {t, source} <= there}, tied


def tie_(model: "nn.Module") -> None:
    """Tell the library which tensors are tied, since the tables that it knows are factorised."""
    for part in model.modules():
        if isinstance(getattr(part, "all_tied_weights_keys", None), dict):
            kept, tied = ties(part)
            part.all_tied_weights_keys = part._tied_weights_keys = kept | tied  # type: ignore[assignment]


def check_resize(model: Any) -> None:
    """Raise if a table of tokens is factorised."""
    from bayestrain.errors import ConversionError
    from bayestrain.nn.layer import TensorLayer

    for layer in (model.get_input_embeddings(), model.get_output_embeddings()):
        if isinstance(layer, TensorLayer):
            raise ConversionError(
                f"A {type(layer).__name__} has a factorised table, which cannot be resized. Resize the embeddings of "
                "the dense model before you convert it, or leave them dense with tensorize_(model, exclude=..)."
            )
