"""`bayestrain compress`: weights in every kind of file, calibration, and what it refuses."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from processes import ENVIRONMENT, python
from safetensors.torch import save_file
from torch import nn
from typer.testing import CliRunner

import bayestrain as bt
from bayestrain.app.cli.app import app
from bayestrain.app.cli.compress import mapped

NETS = """
import torch
from torch import nn
def build(): return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))
def loader():
    while True: yield torch.randn(64, 12), torch.zeros(64)
def number(): return 3
"""
FILES: dict[str, Callable[[nn.Module, Path], None]] = {
    "w.safetensors": lambda model, path: save_file(model.state_dict(), path),
    "w.pt": lambda model, path: torch.save(model.state_dict(), path),
    "w.th": lambda model, path: torch.save(
        {"state_dict": {f"module.{name}": t for name, t in model.state_dict().items()}, "best": 1.0}, path
    ),
}


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 8))


@pytest.fixture(autouse=True)
def trained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "nets", raising=False)
    (tmp_path / "nets.py").write_text(NETS)
    model = network()
    for name, write in FILES.items():
        write(model, tmp_path / name)
    return model


def run(*words: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["compress", *words])
    return result.exit_code, " ".join((result.stdout + result.stderr).split())


@pytest.mark.parametrize("file", FILES)
def test_weights_become_a_smaller_saved_model(file: str, trained: nn.Module) -> None:
    code, text = run(*f"--model nets:build --weights {file} --ratio 2 --data nets:loader --out small".split())
    assert code == 0, text
    assert "change of output" in text
    small = bt.load("small", into=network())
    assert bt.count_parameters(small) <= bt.count_parameters(trained) / 2
    x = torch.randn(200, 12)
    with torch.no_grad():
        assert (small(x) - trained(x)).norm() < 0.9 * trained(x).norm()


@pytest.mark.parametrize(("words", "message"), [
    ("--model nets:build --weights w.pt --out small", "Give one of ratio=, parameters= and tolerance=, got 0"),
    ("--model nets:build --ratio 2 --out small", "--weights names the trained weights"),
    ("--model nets:build --weights none.pt --ratio 2 --out small", "none.pt cannot be read as weights"),
    ("--model nets:build --weights nets.py --ratio 2 --out small", "nets.py cannot be read as weights"),
    ("--model nets:build --weights other.pt --ratio 2 --out small", "are not those of the network"),
    ("--model nets:build --weights list.pt --ratio 2 --out small", "holds no state dict"),
    ("--model nets:number --weights w.pt --ratio 2 --out small", "must build a torch.nn.Module, got a int"),
    ("--model nets:build --weights w.pt --ratio 2 --data nets:number --out small", "must return batches"),
    ("--model nets:build --weights w.pt --parameters 10 --out small", "10 parameters are too few"),
    ("--model nets:build --weights w.pt --ratio 2 --out full", "full already holds a model"),
])  # fmt: skip
def test_what_is_refused_writes_nothing(words: str, message: str, trained: nn.Module) -> None:
    torch.save({"0.weight": torch.zeros(2, 2)}, "other.pt")
    torch.save([1, 2], "list.pt")
    bt.save(trained, "full")
    before = Path("full/model.json").read_bytes()
    code, text = run(*words.split())
    assert code == 2, text
    assert message in text
    assert not Path("small").exists()
    assert Path("full/model.json").read_bytes() == before


def test_a_file_cannot_run_code_and_what_cannot_stay_on_disk_is_read() -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, tuple[str, str]]:
            return open, ("touched", "w")

    torch.save({"0.weight": Evil()}, "evil.pt")
    code, text = run("--model", "nets:build", "--weights", "evil.pt", "--ratio", "2", "--out", "small")
    assert code == 2, text
    assert not Path("touched").exists()
    # Weights of another dtype or under two names, and buffers that no file has.
    Path("odd.py").write_text(ODD)
    tied = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    save_file(tied.state_dict(), "tied.safetensors")
    assert mapped("nets:build", Path("w.safetensors")) is not None
    assert mapped("odd:half", Path("w.safetensors")) is None
    assert mapped("odd:buffered", Path("w.safetensors")) is None
    assert mapped("odd:tied", Path("tied.safetensors")) is None


ODD = """
from nets import *
def half(): return build().bfloat16()
def tied():
    net = nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 24))
    net[1].weight = net[0].weight
    return net
def buffered():
    net = build()
    net.register_buffer("scale", torch.ones(2), persistent=False)
    return net
"""


MEASURED = """
import threading, time, sys, torch
from pathlib import Path
import bayestrain as bt
from bayestrain.app.cli.compress import mapped
def anonymous(): return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) << 10
def watch():
    while True:
        peak[0] = max(peak[0], anonymous())
        time.sleep(0.005)
warm = torch.nn.Sequential(torch.nn.Linear(256, 256))
bt.compress_(warm, tolerance=0.9, formats=("svd",), progress=False)
peak = [start := anonymous()]
threading.Thread(target=watch, daemon=True).start()
model = mapped("deep:build", Path("deep.safetensors"))
bt.compress_(model, tolerance=0.9, formats=("svd",), progress=False)
print(bt.count_parameters(model), peak[0] - start)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the kernel tells no peak")
def test_a_model_larger_than_memory_is_read_layer_by_layer(tmp_path: Path) -> None:
    code = "nn.Sequential(*(nn.Linear(256, 256) for _ in range(128)))"
    Path("deep.py").write_text(f"from torch import nn\ndef build(): return {code}\n")
    deep = eval(code)
    save_file(deep.state_dict(), tmp_path / "deep.safetensors")
    heap = {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back at once, so that the peak is what is in use
    parameters, peak = map(int, python("-c", MEASURED, env=ENVIRONMENT | heap).stdout.split())
    assert parameters < bt.count_parameters(deep) / 3
    assert peak < (tmp_path / "deep.safetensors").stat().st_size * 0.75


def test_a_transformers_folder(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 12, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.LlamaConfig(vocab_size=32, max_position_embeddings=16, **sizes)
    transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "llama")
    code, text = run("--model", str(tmp_path / "llama"), "--ratio", "2", "--out", "small")
    assert code == 0, text
    small = bt.load("small", into=transformers.LlamaForCausalLM(config))
    assert any("mlp" in name for name in bt.ranks(small))
    assert small.generate(torch.ones(1, 2, dtype=torch.int64), max_new_tokens=3, do_sample=False).shape[1] <= 5
