"""The file formats of `export`: how a `torch.export` program becomes a file's bytes, and a function that runs them."""

import io
import json
import logging
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.export.graph_signature import TensorArgument

from bayestrain.errors import ConfigError

FOLDED = 16  # entries of tensors that are computed in advance; more would put products of weights beside the weights

Written = tuple[bytes, int, Callable[..., Any]]  # bytes of a file, how many operations it has, and what runs it


def to_onnx(
    program: Any, about: Mapping[str, Any], axes: Mapping[str, Mapping[int, str]], outputs: list[str]
) -> Written:
    import onnxruntime  # type: ignore[import-untyped]
    import onnxscript.optimizer

    odd = [spec.arg for spec in program.graph_signature.output_specs if not isinstance(spec.arg, TensorArgument)]
    if any(getattr(arg, "value", arg) is not None for arg in odd):  # a None is left out
        raise ConfigError("An ONNX file returns tensors, and this network a number or text, too. Leave that out.")
    options: dict[str, Any] = {"input_names": list(axes), "output_names": outputs}
    made: Any = torch.onnx.export(program, dynamo=True, optimize=False, verbose=False, **options)
    onnxscript.optimizer.optimize(made.model, input_size_limit=FOLDED, output_size_limit=FOLDED)
    proto, symbols = made.model_proto, dict[str, str]()
    graph = proto.graph
    for own, named in zip(graph.input, axes.values(), strict=True):
        symbols |= {own.type.tensor_type.shape.dim[axis].dim_param: name for axis, name in named.items()}
    for dim in (dim for own in (*graph.input, *graph.output) for dim in own.type.tensor_type.shape.dim):
        if dim.dim_param:
            dim.dim_param = symbols.get(dim.dim_param, dim.dim_param)
    del graph.value_info[:]
    for own in (proto, graph, *graph.node, *graph.initializer, *graph.input, *graph.output):
        own.doc_string = ""
        del own.metadata_props[:]  # traces of the code, for the most part
    for key, value in about.items():
        proto.metadata_props.add(key=key, value=value if isinstance(value, str) else json.dumps(value))
    content, quiet_session = proto.SerializeToString(), onnxruntime.SessionOptions()
    quiet_session.log_severity_level = 3
    session = onnxruntime.InferenceSession(content, quiet_session, providers=["CPUExecutionProvider"])

    def run(*args: Tensor, **kwargs: Tensor) -> list[Tensor]:
        inputs = zip(axes, (*args, *kwargs.values()), strict=True)
        return [torch.from_numpy(each) for each in session.run(None, {name: own.numpy() for name, own in inputs})]

    return content, len(graph.node), run


def to_pt2(program: Any, about: Mapping[str, Any], *_: Any) -> Written:
    file = io.BytesIO()
    torch.export.save(program, file, extra_files={"metadata.json": json.dumps(about, indent=2)})
    file.seek(0)
    return file.getvalue(), _operations(program), torch.export.load(file).module().__call__


def to_executorch(program: Any, about: Mapping[str, Any], *_: Any) -> Written:
    """A file that ExecuTorch's runtime reads; its method "metadata" returns what it says of itself, as JSON."""
    from executorch.exir import to_edge_transform_and_lower  # type: ignore[import-not-found]
    from executorch.runtime import Runtime  # type: ignore[import-not-found]

    edge = to_edge_transform_and_lower(program, constant_methods={"metadata": json.dumps(about)})
    content = bytes(edge.to_executorch().buffer)
    method = Runtime.get().load_program(content).load_method("forward")
    return content, _operations(program), lambda *args, **kwargs: list(method.execute((*args, *kwargs.values())))


def _operations(program: Any) -> int:
    return sum(node.op == "call_function" for node in program.graph.nodes)


WRITERS: dict[str, Callable[..., Written]] = {"onnx": to_onnx, "pt2": to_pt2, "executorch": to_executorch}
NEEDED: dict[str, Sequence[str]] = {"onnx": ("onnx", "onnxscript", "onnxruntime"), "executorch": ("executorch",)}


@contextmanager
def quiet() -> Iterator[None]:
    """Keep the exporters' warnings, which concern their own code, from the user."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        logger.setLevel(logging.ERROR)
        try:
            yield
        finally:
            logger.setLevel(level)
