"""`bayestrain serve` as a process: answers under load, bad requests, and the page in a browser."""

import base64
import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import pytest
import serve_kit as kit
from processes import python
from test_report_browser import chromium  # noqa: F401  # a fixture
from typer.testing import CliRunner

from bayestrain.app.cli.app import app
from bayestrain.app.cli.serve import LARGEST

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return kit.train(tmp_path_factory.mktemp("served") / "run")


@pytest.fixture(scope="module")
def server(run: Path) -> Iterator[tuple[int, int]]:
    with kit.server(run) as found:
        yield found


def flat(pixels: Any) -> list[float]:
    return [round(float(value) / 255, 3) for value in pixels.ravel()]


def test_it_predicts_what_the_command_predicts(server: tuple[int, int], run: Path, tmp_path: Path) -> None:
    port, digits = server[0], kit.digits(3)
    for number, pixels in enumerate(digits):
        (tmp_path / f"{number}.png").write_bytes(kit.png(pixels))
    files = [str(tmp_path / f"{number}.png") for number in range(3)]
    expected = json.loads(CliRunner().invoke(app, ["predict", str(run), *files, "--json"]).stdout)
    for pixels, row in zip(digits, expected, strict=True):
        status, found = kit.ask(port, kit.png(pixels), "image/png")
        assert status == 200
        (own,) = found["predictions"]
        assert own["class"] == row["class"]
        assert own["probabilities"] == pytest.approx(row["probabilities"], abs=1e-5)
        assert {"total", "aleatoric", "epistemic", "low", "high", "reason"} <= own.keys()
    status, found = kit.ask(port, json.dumps({"inputs": [flat(pixels) for pixels in digits]}))
    assert status == 200
    assert [row["class"] for row in found["predictions"]] == [row["class"] for row in expected]
    lines = "\n".join(",".join(map(str, flat(pixels))) for pixels in digits)
    assert kit.ask(port, lines.encode(), "text/csv; charset=utf-8")[1] == found
    assert kit.ask(port, kit.png(digits[0]), "image/png", "?invert=true")[1]["predictions"][0]["changed"] == "inverted"
    with urlopen(f"http://127.0.0.1:{port}/health") as reply:
        about = json.load(reply)
    assert (about["status"], about["particles"], about["input_shape"]) == ("ok", 2, [1, 28, 28])


def test_the_client_of_the_documents(server: tuple[int, int]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "serve.md").read_text()
    (block,) = re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    printed = python("-c", block.replace("localhost:8000", f"127.0.0.1:{server[0]}")).stdout
    assert re.match(r"\d 0\.\d+ between 0\.\d+ and 0\.\d+\nuncertainty: \d", printed)
    options = CliRunner().invoke(app, ["serve", "--help"]).stdout
    assert all(part in options for part in ("--port", "--host", "--device", "'bayestrain[serve]'"))


def test_concurrent_answers_are_the_serial_ones_and_memory_stays(server: tuple[int, int]) -> None:
    """500 requests from 16 threads; benchmarks/serve.py sends 10,000 from 32."""
    port, process = server
    bodies = [(kit.png(pixels), "image/png") for pixels in kit.digits(20)]
    bodies += [(json.dumps({"inputs": [flat(pixels)]}).encode(), "application/json") for pixels in kit.digits(20)]
    serial = [kit.ask(port, *body) for body in bodies]
    assert {status for status, _ in serial} == {200}

    def one(number: int) -> bool:
        return kit.ask(port, *bodies[number % len(bodies)]) == serial[number % len(bodies)]

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(one, range(100)))
        before = kit.memory(process)
        assert all(pool.map(one, range(400)))
    assert kit.memory(process) < before + (32 << 20)


JSON = "application/json"
NOISE = np.arange(784, dtype=np.uint8).reshape(28, 28) ** 3
WRONG: dict[str, tuple[Any, str, int, str]] = {
    "no JSON": (b"{", JSON, 422, "rows of numbers: Expecting property"),
    "no text": (b"\xff\xfe\xfd", JSON, 422, "rows of numbers"),
    "deep": (b"[" * 100_000, JSON, 422, "recursion"),
    "another key": (b'{"rows": []}', JSON, 422, 'must be {"inputs"'),
    "a list": (b"[[1, 2]]", JSON, 422, 'must be {"inputs"'),
    "nothing": (b'{"inputs": []}', JSON, 422, "has the shape 0"),
    "ragged": (b'{"inputs": [[1, 2], [3]]}', JSON, 422, "rows of numbers: setting an array element"),
    "text": (b'{"inputs": [["a", "b"]]}', JSON, 422, "rows of numbers"),
    "null": (b'{"inputs": [null]}', JSON, 422, "rows of numbers"),
    "huge": (b'{"inputs": [[1' + b"0" * 400 + b"]]}", JSON, 422, "number"),
    "wrong size": (b'{"inputs": [[1, 2, 3]]}', JSON, 422, "shape 1x28x28"),
    "NaN": (json.dumps({"inputs": [[float("nan")] * 784]}), JSON, 422, "not finite"),
    "infinite": (json.dumps({"inputs": [[1e999] * 784]}), JSON, 422, "not finite"),
    "no picture": (b"GIF89a no", "image/gif", 422, "The input"),
    "half a picture": (kit.png(NOISE)[:300], "image/png", 422, "The input"),
    "no numbers": (b"a,b\nc,d\n", "text/csv", 422, "rows of numbers"),
    "empty": (b"", "text/csv", 422, "no row"),
    "another type": (b"x", "application/x-pickle", 415, "content type"),
    "too large": (b"1," * LARGEST, "text/csv", 413, "8,388,608 bytes"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_bad_request_gets_the_reason(server: tuple[int, int], name: str) -> None:
    body, kind, status, reason = WRONG[name]
    found, reply = kit.ask(server[0], body, kind)
    assert (found, reply.keys()) == (status, {"error"}), reply
    assert reason in reply["error"]
    assert "/tmp" not in reply["error"]
    assert kit.ask(server[0], json.dumps({"inputs": [[0.0] * 784]}))[0] == 200


def test_a_body_without_a_length_is_read_only_up_to_the_limit(server: tuple[int, int]) -> None:
    sent = []

    def endless() -> Iterator[bytes]:
        for number in range(10_000):
            sent.append(number)
            yield b"0," * (1 << 15)

    try:
        status, reply = kit.ask(server[0], endless(), "text/csv", encode_chunked=True)
        assert (status, reply.keys()) == (413, {"error"})
    except (BrokenPipeError, ConnectionResetError):
        pass  # the server has closed the connection while the client still sends
    assert len(sent) < 2_000


@pytest.mark.parametrize(
    ("query", "status", "reason"), [("?invert=perhaps", 422, "invert: "), ("/it", 404, "Not Found"), ("", 405, "GET ")]
)
def test_a_request_for_nothing_gets_the_reason(server: tuple[int, int], query: str, status: int, reason: str) -> None:
    with pytest.raises(HTTPError) as found:
        urlopen(Request(f"http://127.0.0.1:{server[0]}/predict{query}", None if status == 405 else b""))
    reply = json.load(found.value)
    assert (found.value.code, reply.keys()) == (status, {"error"})
    assert reason in reply["error"]
    assert status != 405 or found.value.headers["Allow"] == "POST"


def test_a_used_port_and_a_missing_extra(server: tuple[int, int], run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    used = CliRunner().invoke(app, ["serve", str(run), "--port", str(server[0])])
    assert used.exit_code == 2
    assert f"Cannot listen on 127.0.0.1:{server[0]}" in " ".join(used.stderr.split())
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    missing = CliRunner().invoke(app, ["serve", str(run)])
    assert missing.exit_code == 2
    assert "pip install 'bayestrain[serve]'" in " ".join(missing.stderr.split())


def test_the_page_in_a_browser(chromium: Any, server: tuple[int, int], tmp_path: Path) -> None:  # noqa: F811
    from selenium.webdriver.common.by import By
    from selenium.webdriver.support.ui import WebDriverWait

    digit = kit.digits(1)[0]
    (tmp_path / "digit.png").write_bytes(kit.png(digit))
    expected = kit.ask(server[0], kit.png(digit), "image/png")[1]["predictions"][0]["class"]
    chromium.get_log("browser")
    chromium.get(f"http://127.0.0.1:{server[0]}/")
    state, found = chromium.find_element(By.ID, "state"), chromium.find_element(By.ID, "found")

    def wait_for(text: str) -> str:
        WebDriverWait(chromium, 30).until(lambda _: text in state.text)
        return str(found.text)

    chromium.find_element(By.ID, "file").send_keys(str(tmp_path / "digit.png"))
    answer = wait_for("1 predicted")
    assert f"class {expected}" in answer
    assert all(f"probability of {label} " in answer for label in range(10))
    assert "epistemic" in answer
    chromium.execute_script("arguments[0].value = arguments[1]", chromium.find_element(By.ID, "numbers"),
                            ",".join(map(str, flat(digit))))  # fmt: skip
    chromium.execute_script("document.getElementById('state').textContent = ''")
    chromium.find_element(By.ID, "send").click()
    assert f"class {expected}" in wait_for("1 predicted")
    chromium.execute_script("document.getElementById('numbers').value = '1,2'")
    chromium.find_element(By.ID, "send").click()
    assert wait_for("shape 1x28x28") == ""
    drop = """const items = new DataTransfer(), bytes = Uint8Array.from(atob(arguments[0]), c => c.charCodeAt(0));
        items.items.add(new File([bytes], "digit.png", {type: "image/png"}));
        document.dispatchEvent(new DragEvent("drop", {dataTransfer: items, cancelable: true}));"""
    chromium.execute_script(drop, base64.b64encode(kit.png(digit)).decode())
    assert f"class {expected}" in wait_for("1 predicted")
    errors = [entry for entry in chromium.get_log("browser") if "422" not in entry["message"]]
    assert errors == []
