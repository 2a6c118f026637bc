"""Everything of the package that reads what others wrote, each with valid inputs and a way to damage them."""

import asyncio
import copy
import gzip
import hashlib
import io
import json
import random
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mutations import damaged, json_damaged, safetensors_damaged, spliced
from PIL import Image, features
from run_folders import write_run
from torch import nn

from bayestrain import Posterior, TensorizeConfig, load, save, tensorize_
from bayestrain.app.cli.predict import read_array
from bayestrain.app.cli.serve import application
from bayestrain.app.data.images import idx
from bayestrain.app.data.pictures import read_picture
from bayestrain.app.report import write_report
from bayestrain.app.report.read import read_run
from bayestrain.errors import DataError
from bayestrain.files import check_files
from bayestrain.io.export import _about
from bayestrain.nn import factorized_weights
from bayestrain.posterior import independent
from bayestrain.train import RunFolder, fit
from bayestrain.train import config as configs
from bayestrain.train.folder import LAST
from bayestrain.train.run import load_run, train_run
from paper.fetch import File, cifar


@dataclass
class Reader:
    """Valid inputs, what damages one, and what reads it."""

    seeds: list[Any]
    damage: Callable[[Any, random.Random, list[Any]], Any]
    read: Callable[[Any], object]


def dense() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.BatchNorm1d(16), nn.Linear(16, 12), nn.Linear(12, 3))


def small(format: str = "tt") -> nn.Sequential:
    model = dense()
    tensorize_(model, TensorizeConfig(max_rank=2, format=format))
    return model.eval()


X, Y = torch.randn(24, 2, 4, 4, generator=torch.Generator().manual_seed(0)), torch.arange(24) % 3


def posterior() -> Posterior:
    made = Posterior(independent(small, 2), 24)
    made.step(X, Y)
    return made


def one_of(damage: Callable[[bytes, random.Random, list[bytes]], bytes]) -> Callable[..., Any]:
    """Damages the last part of an input, its bytes."""

    def change(seed: Any, draw: random.Random, others: list[Any]) -> Any:
        return (*seed[:-1], damage(seed[-1], draw, [other[-1] for other in others]))

    return change


def by_name(seed: tuple[str, bytes], draw: random.Random, others: list[tuple[str, bytes]]) -> tuple[str, bytes]:
    """The content of a file is damaged in the way of its kind."""
    name, content = seed
    kinds = {".json": json_damaged, ".safetensors": safetensors_damaged, ".jsonl": line_damaged}
    return name, kinds.get(Path(name).suffix, damaged)(content, draw, [other[1] for other in others])


def line_damaged(content: bytes, draw: random.Random, others: list[bytes]) -> bytes:
    lines = content.splitlines(keepends=True)
    place = draw.randrange(len(lines))
    lines[place] = json_damaged(lines[place], draw, others) + b"\n"
    return b"".join(lines)


def saved_model(folder: Path, *, stacked: bool, description: bool) -> Reader:
    """A saved model or posterior with one damaged file; half of the damaged tensors have the right checksum."""
    weights, seeds = ("posterior" if stacked else "model") + ".safetensors", []
    for place, format in enumerate(["tt"] if stacked else ["tt", "cp"]):
        save(posterior_fixed() if stacked else small(format), own := folder / f"valid{place}")
        seeds.append((own, (own / ("model.json" if description else weights)).read_bytes()))
    place, network = folder / "damaged", [dense()]
    place.mkdir()

    def read(given: tuple[Path, bytes]) -> None:
        source, content = given
        about, tensors = (source / "model.json").read_bytes(), (source / weights).read_bytes()
        if description:
            about = content
        else:
            tensors = content
            if zlib.crc32(content) % 2:
                own = {**json.loads(about), "sha256": hashlib.sha256(content).hexdigest()}
                about = json.dumps(own).encode()
        (place / "model.json").write_bytes(about)
        (place / weights).write_bytes(tensors)
        if zlib.crc32(content) % 4 == 1:
            load(place)  # into the network that the description names
            return
        before = list(network[0])
        try:
            load(place, network[0])
        except BaseException:
            assert list(network[0]) == before, "a refused model changed the network"
            raise
        if factorized_weights(network[0]):
            network[0] = dense()

    return Reader(seeds, one_of(json_damaged if description else safetensors_damaged), read)


def posterior_fixed() -> Posterior:
    made = posterior()
    made.fix_ranks_()
    return made


def checkpoint(folder: Path) -> Reader:
    """A checkpoint's bytes; two in three have the right checksum, so that what is behind it is read."""
    train_small(folder)
    seeds = [((folder / LAST).read_bytes().partition(b"\n")[2],)]

    def read(given: tuple[bytes]) -> None:
        signed = hashlib.sha256(given[0]).hexdigest().encode() + b"\n" if zlib.crc32(given[0]) % 3 else b""
        (folder / LAST).write_bytes(signed + given[0])
        (folder / "checkpoint-previous.pt").unlink(missing_ok=True)
        with RunFolder(folder, resume=True) as opened:
            opened.load_checkpoint()

    return Reader(seeds, one_of(damaged), read)


def train_small(folder: Path, **options: Any) -> None:
    settings: dict[str, Any] = {"epochs": 2, "finetune_epochs": 1, "batch_size": 24, "progress": False, **options}
    fit(small(), (X, Y), folder=folder, **settings)


def resumed(folder: Path) -> Reader:
    """A checkpoint whose content is damaged and whose bytes are not: a run resumes from it."""
    train_small(folder)
    with RunFolder(folder, resume=True) as opened:
        state = opened.load_checkpoint()[0]

    def read(state: dict[str, Any]) -> None:
        content = io.BytesIO()
        torch.save(state, content)
        data = content.getvalue()
        (folder / LAST).write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
        (folder / "checkpoint-previous.pt").unlink(missing_ok=True)
        train_small(folder, resume=True)

    return Reader([state], lambda seed, draw, _: spliced(seed, draw), read)


def state(_: Path) -> Reader:
    own = posterior()
    seeds = [posterior().state_dict(), posterior_fixed().state_dict()]
    holder = [own]

    def read(given: dict[str, Any]) -> None:
        names = holder[0].joint.tensors().keys()
        try:
            holder[0].load_state_dict(given)
        except BaseException:
            assert holder[0].joint.tensors().keys() == names, "a refused state changed the posterior"
            raise
        holder[0] = posterior()

    return Reader(seeds, lambda seed, draw, _: spliced(seed, draw), read)


def config(folder: Path) -> Reader:
    run = configs.RunSettings(model="a:b", data="c:d")
    whole = configs.RunConfig(run=run, tensorize=configs.TensorizeSettings(keep_dense=("a*",), modes={"0": [[2], [3]]}))
    seeds = [(configs.dumps(whole).encode(),), (b'[run]\nmodel = "a:b"\ndata = "c:d"\n[fit]\nmilestones = [0.5]\n',)]
    file = folder / "config.toml"

    def read(given: tuple[bytes]) -> None:
        file.write_bytes(given[0])
        configs.dumps(configs.load(file))

    return Reader(seeds, one_of(damaged), read)


def override(_: Path) -> Reader:
    base = configs.RunConfig(run=configs.RunSettings(model="a:b", data="c:d"))
    texts = ["fit.epochs=3", "fit.optimizer=sgd", "fit.milestones=[0.5]", "tensorize.modes={a=[[2],[3]]}", "run.seed=1"]

    def read(given: tuple[bytes]) -> None:
        base.override([given[0].decode(errors="replace")])

    return Reader([(text.encode(),) for text in texts], one_of(damaged), read)


def run_files(folder: Path, reads: Callable[[Path], object]) -> Reader:
    """The files of finished runs, one of them damaged."""
    valid = {}
    for kind in ("posterior", "regression-posterior"):
        for file in write_run(folder / kind, kind).iterdir():
            valid[kind, file.name] = file.read_bytes()

    def read(given: tuple[str, str, bytes]) -> None:
        kind, name, content = given
        file = folder / kind / name
        file.write_bytes(content)
        try:
            reads(folder / kind)
        finally:
            file.write_bytes(valid[kind, name])

    def change(seed: Any, draw: random.Random, others: list[Any]) -> Any:
        return seed[0], *by_name(seed[1:], draw, [other[1:] for other in others])

    return Reader([(*key, content) for key, content in valid.items()], change, read)


def checksums(folder: Path) -> Reader:
    (folder / "result.json").write_text("{}")
    content = json.dumps({"result.json": hashlib.sha256(b"{}").hexdigest(), "model.json": "0" * 64}).encode()

    def read(given: tuple[bytes]) -> None:
        (folder / "checksums.json").write_bytes(given[0])
        check_files(folder)

    return Reader([(content,)], one_of(json_damaged), read)


def settings(particles: int = 2, epochs: int = 1, **options: Any) -> configs.RunConfig:
    return configs.RunConfig(
        run=configs.RunSettings(model="readers:digits", data="readers:few_digits"),
        fit=configs.FitConfig(epochs=epochs, finetune_epochs=1, **options),
        posterior=configs.PosteriorConfig(particles=particles),
    )


def trained(folder: Path, particles: int = 2) -> Path:
    """A finished run of the embedded example, as `bayestrain train` makes it."""
    train_run(settings(particles), folder / "run")
    (folder / "run" / "checksums.json").unlink()
    return folder / "run"


def digits() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 12), nn.ReLU(), nn.Linear(12, 10))


def few_digits() -> Any:
    draw = torch.Generator().manual_seed(0)
    parts = [(torch.randn(n, 1, 8, 8, generator=draw), torch.arange(n) % 10) for n in (100, 40, 40)]
    return tuple(parts)


def finished_run(folder: Path) -> Reader:
    """What `load_run` reads of a run, except for its config, which names code to call."""
    run = trained(folder, particles=1)
    content = (run / "model.json").read_bytes()

    def read(given: tuple[bytes]) -> None:
        (run / "model.json").write_bytes(given[0])
        load_run(run)

    return Reader([(content,)], one_of(json_damaged), read)


def served(folder: Path) -> Reader:
    """Bodies of POST /predict; an answer is JSON, and never an error of the server's."""
    app = application(trained(folder), "cpu")
    pixels = np.zeros((9, 9), np.uint8)
    picture = io.BytesIO()
    Image.fromarray(pixels).save(picture, "PNG")
    rows = json.dumps({"inputs": [[0.5] * 64] * 2}).encode()
    table = "\n".join([",".join(["0.25"] * 64)] * 2).encode()
    seeds = [
        ("application/json", b"", rows),
        ("text/csv", b"", table),
        ("image/png", b"invert=true", picture.getvalue()),
    ]

    def change(seed: Any, draw: random.Random, others: list[Any]) -> Any:
        kind, query, body = seed
        if draw.random() < 0.1:
            query = damaged(b"invert=false", draw, [body])
        if draw.random() < 0.1:
            kind = draw.choice([*(other[0] for other in others), "", "\0", "application/json; charset=utf-16"])
        damage = json_damaged if seed[0].endswith("json") else damaged
        return kind, query, damage(body, draw, [other[-1] for other in others])

    async def ask(kind: str, query: bytes, body: bytes) -> tuple[int, bytes]:
        scope = {"type": "http", "method": "POST", "path": "/predict", "query_string": query, "http_version": "1.1",
                 "headers": [(b"content-type", kind.encode())], "root_path": "", "scheme": "http",
                 "server": ("test", 80)}  # fmt: skip
        sent: list[Any] = []

        async def receive() -> Any:
            return {"type": "http.request", "body": body, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)

        await app(scope, receive, send)
        return sent[0]["status"], b"".join(message.get("body", b"") for message in sent[1:])

    def read(given: tuple[str, bytes, bytes]) -> None:
        status, answer = asyncio.run(ask(*given))
        found = json.loads(answer)
        assert status < 500, (status, answer[:200])
        if status != 200:
            raise DataError(str(found))

    return Reader(seeds, change, read)


def arrays(folder: Path) -> Reader:
    table = np.linspace(0, 1, 12, dtype=np.float32).reshape(3, 4)
    npy, fortran, pt = io.BytesIO(), io.BytesIO(), io.BytesIO()
    np.save(npy, table)
    np.save(fortran, np.asfortranarray(table.astype(int)))
    torch.save(torch.from_numpy(table), pt)
    seeds = [("a.npy", npy.getvalue()), ("b.npy", fortran.getvalue()), ("a.pt", pt.getvalue()),
             ("a.csv", b"p,q,r,s\n1,2,3,4\n0.5,-1e-3,7,8\n")]  # fmt: skip

    def read(given: tuple[str, bytes]) -> None:
        (folder / given[0]).write_bytes(given[1])
        read_array(folder / given[0], (4,))

    return Reader(seeds, by_name, read)


def archives(folder: Path) -> Reader:
    raw = np.arange(2 * 28 * 28, dtype=np.uint32).astype(np.uint8).tobytes()
    own, record = b"\0\0\x08\x03" + np.array([2, 28, 28], ">u4").tobytes() + raw, (b"\x03" + bytes(3072)) * 2
    digest = hashlib.sha256(own).hexdigest()
    seeds = [("x.gz", gzip.compress(own, mtime=0)), ("x", own), ("idx", own), ("cifar", record)]

    def read(given: tuple[str, bytes]) -> None:
        name, content = given
        if name in ("idx", "cifar"):
            {"idx": idx, "cifar": cifar}[name](content)
            return
        for old in ("x", "x.gz"):
            (folder / old).unlink(missing_ok=True)
        (folder / name).write_bytes(content)
        File("x", len(own), digest).read(folder)

    return Reader(seeds, by_name, read)


def pictures(folder: Path) -> Reader:
    image = Image.effect_noise((20, 16), 60)
    kinds = [("PNG", "L", {}), ("PNG", "I;16", {}), ("PNG", "P", {}), ("PNG", "LA", {}), ("JPEG", "RGB", {}),
             ("GIF", "P", {}), ("BMP", "RGB", {}), ("PPM", "RGB", {}), ("TIFF", "RGB", {}), ("TIFF", "F", {}),
             ("TIFF", "L", {"compression": "tiff_lzw"}), ("WEBP", "RGBA", {}), ("AVIF", "RGB", {})]  # fmt: skip
    seeds = []
    for kind, mode, options in kinds:
        if kind != "AVIF" or features.check("avif"):
            image.convert(mode).save(file := io.BytesIO(), kind, **options)
            seeds.append(("picture", file.getvalue()))

    def read(given: tuple[str, bytes]) -> None:
        (folder / given[0]).write_bytes(given[1])
        read_picture(folder / given[0], (1, 8, 8) if len(given[1]) % 2 else (3, 8, 8))

    return Reader(seeds, by_name, read)


def hub(_: Path) -> Reader:
    """The description of factorised weights in the ``config.json`` of a model of `transformers`."""
    from transformers import GPT2Config, GPT2Model

    from bayestrain.hub.models import FactorizedConfig, FactorizedLoader, describe

    def build() -> GPT2Model:
        return GPT2Model(GPT2Config(vocab_size=20, n_positions=8, n_embd=8, n_layer=1, n_head=2))

    with torch.device("meta"):  # as the library does
        dense = build()
    tensorize_(made := build(), TensorizeConfig(max_rank=2))
    weights = json.dumps(describe(made)).encode()

    def read(given: tuple[bytes]) -> None:
        try:
            found = json.loads(given[0])
        except (ValueError, RecursionError) as error:  # which the library reports
            raise DataError(str(error)) from error
        own = FactorizedConfig(weights=found, version=1)
        FactorizedLoader(own)._process_model_before_weight_loading(copy.deepcopy(dense))

    return Reader([(weights,)], one_of(json_damaged), read)


ABOUT = {"classes": ["a", "b"], "mean": [0.5], "metrics": {"accuracy": 0.9}, "data": "d", "model": "m:b", "name": "n"}


def metadata(read: Callable[[Any], object]) -> Reader:
    """What `export` and `save` are told to write into a file, and a card to show."""
    return Reader([ABOUT], lambda seed, draw, _: spliced(seed, draw), read)


READERS: dict[str, Callable[[Path], Reader]] = {
    "model.json": lambda folder: saved_model(folder, stacked=False, description=True),
    "model.safetensors": lambda folder: saved_model(folder, stacked=False, description=False),
    "model.json of a posterior": lambda folder: saved_model(folder, stacked=True, description=True),
    "posterior.safetensors": lambda folder: saved_model(folder, stacked=True, description=False),
    "checkpoint": checkpoint, "state of a checkpoint": resumed, "state of a posterior": state, "config": config,
    "--set": override, "checksums": checksums, "finished run": finished_run, "HTTP bodies": served,
    "models of transformers": hub, "arrays": arrays, "data archives": archives, "pictures": pictures,
    "files of a run": lambda folder: run_files(folder, read_run),
    "files of a report": lambda folder: run_files(folder, write_report),
    "metadata of an export": lambda _: metadata(partial(_about, small(), None)),
    "metadata of a model": lambda folder: metadata(partial(save, small(), folder / "m")),
}  # fmt: skip
SLOW = {"files of a report": 300, "state of a checkpoint": 20}
SLOW |= dict.fromkeys(("HTTP bodies", "models of transformers", "metadata of a model", "state of a posterior"), 5)
"""How many times fewer inputs a reader gets, because one takes so much longer."""
