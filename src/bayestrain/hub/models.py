"""``save_pretrained`` and ``from_pretrained`` of `transformers` for models with factorised layers.

``config.json`` describes the weights as a quantisation method, which `transformers` asks for the layers to load into,
and names a file of weights that only this module corrects: without it loading fails, instead of random layers.
"""

import json
import re
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from bayestrain.errors import ConfigError, DataError
from bayestrain.files import write_json
from bayestrain.formats import get
from bayestrain.io.plain import PLAIN
from bayestrain.io.save import _built, _sizes, described, parsed
from bayestrain.nn.convert import install
from bayestrain.nn.factorized import FactorizedWeight, RankState
from bayestrain.nn.parameters import HOLDER

METHOD, VERSION = "bayestrain", 1
CORE = re.compile(rf"\.{HOLDER}\.(.+\.)?cores\.\d+$")
REFUSAL = "This model has factorised layers. Run `import bayestrain` before loading it: pip install bayestrain"


@register_quantization_config(METHOD)
class FactorizedConfig(QuantizationConfigMixin):  # type: ignore[misc]
    """What ``config.json`` says about the factorised weights."""

    def __init__(self, weights: Any = None, version: Any = None, **_: Any) -> None:
        self.quant_method, self.version, self.weights = METHOD, version, weights


@register_quantizer(METHOD)
class FactorizedLoader(HfQuantizer):  # type: ignore[misc]
    """Puts factorised layers in place before the weights are read, and leaves an ordinary model."""

    requires_calibration = is_trainable = True

    def is_serializable(self) -> bool:
        return True

    def update_attn_implementation(self, config: Any) -> Any:  # the first method that sees it
        vars(config).pop("transformers_weights", None)
        return config

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> None:
        modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
        known, tensors = dict[str, Any](), dict[str, Any]()
        try:
            if self.quantization_config.version != VERSION:
                raise ValueError(f"its version is {self.quantization_config.version!r}")
            for path, about in self.quantization_config.weights.items():
                names = (path, prefix + path, path.removeprefix(prefix))  # a head may have come or gone
                name = next((name for name in names if name.partition(f".{HOLDER}")[0] in modules), None)
                if name is not None:
                    known[name] = parsed(about)
                    sizes = known[name]["layout"].sizes
                    shapes = get(about["format"]).equation(sizes).shapes(sizes, _sizes(about["ranks"]))
                    tensors |= {f"{name}.cores.{k}": torch.empty(s, device="meta") for k, s in enumerate(shapes)}
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"config.json describes no factorised weights of version {VERSION}: {error!r}.") from error
        for target, source in model.all_tied_weights_keys.items():  # which the library does after loading only
            owner, _, key = target.rpartition(".")
            setattr(model.get_submodule(owner), key, model.get_parameter(source))
        install(model, _built(Path("config.json"), {"weights": known}, model, tensors)[1])
        for path in (path for path, about in known.items() if about.get("lambda")):
            model.get_submodule(path).attach_rank_state()
        tied = tie_(model)
        model.all_tied_weights_keys = {t: source for t, source in model.all_tied_weights_keys.items() if t not in tied}

        def drop(_: Any, state: dict[str, Any], *__: Any) -> None:
            for name in tied & state.keys():
                del state[name]

        self.once = model.register_state_dict_post_hook(drop)  # the files have what layers share once

    def postprocess_model(self, model: Any, **_: Any) -> None:
        self.once.remove()
        tie_(model)
        for state in (module for module in model.modules() if isinstance(module, RankState)):
            state.start = tuple(state.start_ranks.tolist())
        self.remove_quantization_config(model)


def tie_(model: Any) -> set[str]:
    """Tell the library which tensors are tied, as its names are of dense tables; the names of factorised ones."""
    tied = dict[str, str]()
    for part in reversed([module for module in model.modules() if isinstance(module, PreTrainedModel)]):
        first, tied = dict[FactorizedWeight, str](), {}
        for path, weight in part.named_modules(remove_duplicate=False):
            if isinstance(weight, FactorizedWeight) and (source := first.setdefault(weight, path)) != path:
                tied |= {f"{path}.{name}": f"{source}.{name}" for name in weight.state_dict()}
        there = {name for name, _ in part.named_parameters(remove_duplicate=False)}
        kept = {target: source for target, source in part.all_tied_weights_keys.items() if {target, source} <= there}
        part.all_tied_weights_keys = part._tied_weights_keys = kept | tied
    return set(tied)


def describe(model: nn.Module) -> dict[str, Any]:
    found = described(model)
    for path, about in found.items():
        weight: Any = model.get_submodule(path)
        about |= {"ranks": weight.ranks, "lambda": weight.rank_state is not None}
    return found


save, load = PreTrainedModel.save_pretrained, PreTrainedModel.from_pretrained.__func__


@wraps(save)
def save_pretrained(self: Any, *args: Any, **kwargs: Any) -> Any:
    config, weights = self.config, describe(self)
    found = getattr(config, "quantization_config", None)
    method = found.get("quant_method") if isinstance(found, dict) else getattr(found, "quant_method", None)
    if PLAIN in vars(self):
        raise ConfigError("from_pretrained cannot load what to_plain has made. Save the model that to_plain was given.")
    if not weights and method != METHOD:
        return save(self, *args, **kwargs)
    if weights and method not in (None, METHOD):
        raise ConfigError("The model is quantised, too. Save it with bayestrain.save(model, folder) instead.")
    if weights:
        tie_(self)

    def save_config(folder: Any, **options: Any) -> None:
        del vars(config)["save_pretrained"]
        config.save_pretrained(folder, **options)
        content = json.loads((file := Path(folder, "config.json")).read_text(encoding="utf-8"))
        about = {"quant_method": METHOD, "version": VERSION, "weights": weights}
        new = {"quantization_config": about, "transformers_weights": REFUSAL}
        rest = {key: value for key, value in content.items() if key not in new}  # it may describe another model
        write_json(file, rest | new if weights else rest)

    vars(config)["save_pretrained"] = save_config  # for this once: a description that stayed would soon be wrong
    try:
        return save(self, *args, **kwargs)
    finally:
        vars(config).pop("save_pretrained", None)


@wraps(load)
def from_pretrained(cls: Any, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
    model, info = load(cls, *args, output_loading_info=True, **kwargs)
    modules, prefix = dict(model.named_modules()), f"{model.base_model_prefix}."
    for key in sorted(key for key in info["unexpected_keys"] if CORE.search(key)):
        path = key.partition(f".{HOLDER}")[0]
        if not modules.keys().isdisjoint((path, prefix + path, path.removeprefix(prefix))):
            raise DataError(f"The files have cores of {path!r}, which the config does not describe. Leave config= out.")
    return (model, info) if output_loading_info else model


PreTrainedModel.save_pretrained = save_pretrained
PreTrainedModel.from_pretrained = classmethod(from_pretrained)  # type: ignore[arg-type]
