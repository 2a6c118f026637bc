"""Read the idx format of MNIST and Fashion-MNIST.

An idx file is a big-endian header (two zero bytes, the type code 8 for unsigned bytes, the number of
dimensions, then each dimension as four bytes) followed by exactly the product of the dimensions in bytes.
"""

from __future__ import annotations

import math
import struct

import torch
from torch import Tensor

from bayestrain.errors import DataError

UNSIGNED_BYTE = 8


def parse(content: bytes, name: str) -> Tensor:
    """The uint8 tensor that `content`, the whole of an uncompressed idx file, holds.

    `name` is only for the messages. Raises `DataError` unless the header is that of an idx file of unsigned
    bytes and the length is exactly the one the header announces.
    """
    if len(content) < 4 or content[:2] != b"\0\0" or content[2] != UNSIGNED_BYTE or content[3] == 0:
        raise DataError(
            f"{name} is not an idx file of unsigned bytes: such a file starts with 00 00 08 and the number of "
            f"dimensions, this one with {content[:4].hex(' ') or 'nothing (it is empty)'}. "
            "Get the file anew from its official source"
        )
    dimensions = content[3]
    header = 4 + 4 * dimensions
    if len(content) < header:
        raise DataError(
            f"{name} is truncated: its {dimensions}-dimensional header takes {header} bytes, "
            f"the file has {len(content)}. Get the file anew from its official source"
        )
    shape = struct.unpack(f">{dimensions}I", content[4:header])
    expected = header + math.prod(shape)
    if len(content) != expected:
        fault = "is truncated" if len(content) < expected else "has bytes left over"
        raise DataError(
            f"{name} {fault}: its header announces shape {shape}, that is {expected} bytes, "
            f"the file has {len(content)}. Get the file anew from its official source"
        )
    if math.prod(shape) == 0:
        return torch.empty(shape, dtype=torch.uint8)
    # A bytearray, because torch warns about tensors over read-only memory.
    return torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=header).reshape(shape)
