"""Damage to valid files, drawn from a seeded generator: bytes, JSON, safetensors, and Python objects."""

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

TEXTS = [
    b"9" * 5_000, b"-1", b"0", b"1e999", b"NaN", b"-Infinity", b"null", b"true", b'""', b"[]", b"{}", b"\xff\xfe",
    b"\0", b"9223372036854775808", b"../../x", b"\n",
    b"[" * 5_000, b"[" * 900 + b"]" * 900, b'{"a":' * 20_000, b'"\\ud800"', b"1e13", b"1" + 13 * b"0",
    b"0x10", b"1979-05-27T07:32:00Z", b"'''", b"[[a]]", b"a.b.c = 1",
]  # fmt: skip
NUMBERS = (0, 1, 2, 127, 255, 256, 2**15, 2**16 - 1, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)


def deep(levels: int = 200) -> list[Any]:
    """Lists within lists."""
    found: list[Any] = []
    for _ in range(levels):
        found = [found]
    return found


VALUES: list[Callable[[], Any]] = [
    lambda: None, lambda: True, lambda: False, lambda: 0, lambda: 1, lambda: -1, lambda: 7, lambda: 10**13,
    lambda: 2**31, lambda: 2**63, lambda: 10**400, lambda: 0.5, lambda: -1.5, lambda: 1e-320, lambda: 1e308,
    lambda: float("nan"), lambda: float("inf"), lambda: "", lambda: "x" * 3_000, lambda: "\ud800", lambda: "a|<b>\n",
    list, dict, lambda: [None], lambda: [[]], lambda: [1, 2, 3], lambda: [0.0] * 500, lambda: {"a": 1}, deep,
    lambda: [10**13, 10**13], lambda: {"": {"": {}}},
]  # fmt: skip
TENSORS: list[Callable[[Tensor], Any]] = [
    lambda t: t.double(), lambda t: t.half(), lambda t: t.to(torch.int64), lambda t: t.bool(), lambda t: t[None],
    lambda t: t.flatten(), lambda t: t.reshape(-1)[:0], lambda t: t.reshape(-1)[:1].sum(), lambda t: t.tolist(),
    lambda t: torch.full_like(t, float("nan")) if t.is_floating_point() else torch.full_like(t, 1),
    lambda t: torch.full_like(t, float("inf")) if t.is_floating_point() else -t.to(torch.int64),
    lambda t: torch.cat([t.reshape(-1), t.reshape(-1)]), lambda t: t.to_sparse() if t.ndim else t[None],
    lambda t: t.to("meta"), lambda t: t.to(torch.complex64), lambda t: t.mT if t.ndim > 1 else t[None, None],
]  # fmt: skip


def damaged(content: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """One to four changes of the bytes: bits, bytes and numbers replaced; parts cut, repeated, or spliced in."""
    data = bytearray(content)
    for _ in range(draw.choice((1, 1, 1, 2, 4))):
        size, kind = len(data), draw.randrange(9)
        place = draw.randrange(min(size, 200) + 1) if draw.random() < 0.5 else draw.randrange(size + 1)
        end = min(size, place + draw.choice((1, 4, 16, 300)))
        if kind == 0 and size:
            data[place % size] ^= 1 << draw.randrange(8)
        elif kind == 1 and size:
            data[place % size] = draw.randrange(256)
        elif kind == 2:
            del data[place:]
        elif kind == 3:
            del data[place:end]
        elif kind == 4:
            data[place:place] = data[place:end] * draw.choice((1, 2, 30))
        elif kind == 5:
            data[place:place] = draw.randbytes(draw.choice((1, 2, 8, 100)))
        elif kind == 6:
            data[place : place + draw.choice((0, 1, 3))] = draw.choice(TEXTS)
        elif kind == 7:
            number = struct.pack(draw.choice(("<Q", ">Q")), draw.choice(NUMBERS))
            width = draw.choice((1, 2, 4, 8))
            data[place : place + width] = number[:width] if draw.random() < 0.5 else number[-width:]
        else:
            other = draw.choice(others)
            start = draw.randrange(len(other) + 1)
            data[place:end] = other[start : start + draw.choice((1, 16, 300, 10_000))]
    return bytes(data)


def places(value: Any, found: list[tuple[Any, Any]] | None = None) -> list[tuple[Any, Any]]:
    """(container, key) of everything inside dicts and lists."""
    found = [] if found is None else found
    for key in value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ():
        found.append((value, key))
        places(value[key], found)
    return found


def spliced(value: Any, draw: random.Random) -> Any:
    """One to three changes of an object of dicts, lists, tensors and plain values, which is copied first."""
    root = [copy.deepcopy(value)]
    for _ in range(draw.choice((1, 1, 1, 2, 3))):
        there = places(root)
        owner, key = draw.choice(there)
        kind = draw.randrange(6)
        if isinstance(owner[key], Tensor) and draw.random() < 0.8:
            owner[key] = draw.choice(TENSORS)(owner[key])
        elif kind == 0 and owner is not root:
            del owner[key]
        elif kind == 1 and owner is not root and isinstance(owner, dict):
            owner[draw.choice(("", "x", str(key) + "0", "__class__", "../x"))] = owner.pop(key)
        elif kind == 2:
            other, own = draw.choice(there)
            owner[key] = copy.deepcopy(other[own])
        elif kind == 3 and isinstance(owner, list):
            owner.insert(key, copy.deepcopy(owner[key]))
        elif kind == 4 and isinstance(owner[key], int | float) and not isinstance(owner[key], bool):
            owner[key] = draw.choice(
                (owner[key] + 1, -owner[key], owner[key] * 10.5 if abs(owner[key]) < 1e99 else 0.1)
            )
        else:
            owner[key] = draw.choice(VALUES)()
    return root[0]


def json_damaged(content: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Damaged as bytes, or as what the JSON holds."""
    if draw.random() < 0.4:
        return damaged(content, draw, others)
    return json.dumps(spliced(json.loads(content), draw)).encode()


def safetensors_damaged(content: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    """Damaged as bytes, or in the header, which stays consistent with its length."""
    if draw.random() < 0.4:
        return damaged(content, draw, others)
    size = int.from_bytes(content[:8], "little")
    header = json_damaged(content[8 : 8 + size], draw, others)
    return len(header).to_bytes(8, "little") + header + content[8 + size :]
