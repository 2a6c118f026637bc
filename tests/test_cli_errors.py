"""What the command line refuses: one message on stderr, exit code 2, no traceback, nothing overwritten."""

from __future__ import annotations

import json
import resource
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from bayestrain.cli.app import app
from bayestrain.data import datasets
from bayestrain.train import toml

TINY = ["fit.epochs=1", "fit.finetune_epochs=1", "fit.batch_size=2500", "tensorize.max_rank=3"]
TRAIN_TINY = ["train", "--quiet", *(word for setting in TINY for word in ("--set", setting))]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run, to be copied before something is done to it."""
    folder = tmp_path_factory.mktemp("trained") / "run"
    assert CliRunner().invoke(app, [*TRAIN_TINY, "--out", str(folder)]).exit_code == 0
    return folder


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("BAYESTRAIN_DATA", str(tmp_path / "cache"))


def refused(*arguments: str) -> str:
    """Run the command, check that it fails as a user's error should, and return its message."""
    result: Result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    return " ".join(result.stderr.split())


def a_run(folder: str, *, finished: bool, overrides: tuple[str, ...] = ()) -> Path:
    path = Path(folder)
    path.mkdir(parents=True)
    toml.save(toml.named("mnist-mini", overrides=overrides), path / "config.toml")
    (path / "checkpoint-last.pt").write_text("a checkpoint")
    if finished:
        (path / "result.json").write_text("{}")
    return path


@contextmanager
def no_file_above(size: int) -> Iterator[None]:
    """As on a disk with hardly any room left."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_unknown_experiment() -> None:
    assert refused("train", "mnits").startswith('bayestrain: There is no experiment "mnits". Did you mean "mnist"?')
    assert not Path("runs").exists()


def test_unknown_preset() -> None:
    assert 'Did you mean "paper"?' in refused("train", "mnist", "--preset", "papr")
    assert 'mnist-mini has no preset "paper"' in refused("train", "--preset", "paper")


def test_bad_config_files() -> None:
    assert "no.toml cannot be read: No such file or directory." in refused("train", "--config", "no.toml")
    Path("bad.toml").write_text('base = "mnist"\n[fit\n')
    assert "bad.toml, line 2: not valid TOML" in refused("train", "--config", "bad.toml")
    Path("wrong.toml").write_text('base = "mnist"\n[fit]\nepocs = 1\n')
    assert 'wrong.toml, line 3: There is no setting "fit.epocs". Did you mean "fit.epochs"?' in refused(
        "train", "--config", "wrong.toml"
    )
    Path("based.toml").write_text('base = "mnist"\n')
    assert "Leave cifar10-cnn out" in refused("train", "cifar10-cnn", "--config", "based.toml")
    assert 'write base = "mnist.paper"' in refused("train", "--preset", "paper", "--config", "based.toml")
    assert not Path("runs").exists()


def test_bad_settings() -> None:
    assert "--set fit.epochs=many: fit.epochs must be a whole number" in refused("train", "--set", "fit.epochs=many")
    assert "--seed -1: experiment.seed must be a whole number" in refused("train", "--seed", "-1")
    assert "Invalid value for '--seed'" in refused("train", "--seed", "x")
    assert '--set fit=3: "fit" is a section, not a setting. [fit] has epochs, batch_size,' in refused(
        "train", "--set", "fit=3"
    )
    assert 'There is no setting "base". The sections are' in refused("train", "--set", "base=mnist")
    assert not Path("runs").exists()


def test_options_of_plans_without_plan() -> None:
    for option, words in (("--batch", ["--batch", "1"]), ("--training", ["--training"])):
        message = f"bayestrain: {option} is about the plans that --plan shows. Add --plan, or leave {option} out."
        assert refused("inspect", "run", *words) == message
        assert refused("inspect", "run", "--json", *words) == message


def test_what_was_noted_on_an_error_is_told() -> None:
    assert "This happened at layer '1'" in refused("train", "--set", "tensorize.modes.1=[[2,3],[4,5]]")


def test_output_folder_that_cannot_be_written() -> None:
    Path("file").write_text("precious")
    assert "file/run cannot be written: Not a directory" in refused("train", "--out", "file/run")
    assert "file is there already and is no run" in refused("train", "--out", "file", "--overwrite")
    assert Path("file").read_text() == "precious"


def test_a_folder_of_someone_elses_is_never_touched() -> None:
    Path("photos").mkdir()
    Path("photos/cat.jpg").write_text("cat")
    for option in ("--quiet", "--overwrite"):
        assert "photos is there already and is no run of BayesTrain" in refused("train", "--out", "photos", option)
    assert contents(Path("photos")) == {"cat.jpg": b"cat"}


@pytest.mark.parametrize("finished", [True, False])
def test_a_run_is_not_overwritten_unless_told(finished: bool) -> None:
    run = a_run("run", finished=finished)
    before = contents(run)
    message = refused("train", "--out", "run")
    assert ("holds a finished run" if finished else "Go on with it with --resume") in message
    assert "--overwrite" in message
    assert contents(run) == before


@pytest.mark.parametrize(
    "setting",
    [
        'tensorize.keep_dense=["nope"]',
        'tensorize.modes."1"=[[7,4,7,5],[5,5,5,5]]',
        "data.validation_fraction=1e-9",
        "fit.target_ratio=1e9",
        "fit.target_ratio=1.5",
    ],
)
def test_overwriting_with_what_cannot_be_trained_costs_nothing(setting: str) -> None:
    run = a_run("run", finished=True)
    before = contents(run)
    refused("train", "--out", "run", "--overwrite", "--set", setting)
    assert contents(run) == before


@pytest.mark.parametrize("start", ["independent", "jitter"])
def test_more_particles_than_the_memory_holds_cost_nothing(start: str) -> None:
    run = a_run("run", finished=True)
    before = contents(run)
    message = refused(
        "train", "--out", "run", "--overwrite", "--particles", str(10**9), "--set", f"posterior.start={start}"
    )
    unknown = start == "jitter"  # how large a MAP point will be, and so how many would fit
    assert ("1000000000 particles cannot fit into memory, whatever" if unknown else "This cannot fit: 1000") in message
    assert ("Use at most" in message) == (not unknown)
    assert contents(run) == before


def test_a_config_of_the_users_own_is_never_written_over() -> None:
    own = Path("mine") / "config.toml"
    own.parent.mkdir()
    own.write_text('# mine\nbase = "mnist-mini"\n')
    assert "your own" in refused("train", "--config", str(own), "--out", "mine", "--overwrite")
    assert "--overwrite" in refused("train", "--out", "mine")
    assert own.read_text().startswith("# mine")


@pytest.mark.parametrize(
    ("size", "file", "words"),
    [(2048, "config.toml", []), (20480, "checkpoint-last.pt", ["--set", "fit.tensorboard=true"])],
)
def test_a_full_disk_before_the_first_checkpoint_leaves_nothing_to_resume(
    size: int, file: str, words: list[str]
) -> None:
    with no_file_above(size):
        message = refused(*TRAIN_TINY, *words, "--out", "run")
    assert f"run/{file} cannot be read or written: File too large. Make room first." in message
    assert message.endswith("run the same command again.")
    assert not Path("run").exists()


def test_a_full_disk_in_a_map_point_leaves_nothing_to_resume() -> None:
    with no_file_above(20480):
        message = refused(*TRAIN_TINY, "--out", "run", "--particles", "2")
    assert "run/map/checkpoint-last.pt cannot be read or written" in message
    assert message.endswith("run the same command again.")
    assert not Path("run").exists()


def test_a_full_disk_at_the_end_of_a_run_says_how_to_go_on() -> None:
    with no_file_above(61440):
        message = refused(*TRAIN_TINY, "--out", "run")
    assert "run/evaluation.safetensors cannot be read or written: File too large." in message
    assert message.endswith("train --resume --out run")
    assert CliRunner().invoke(app, ["train", "--resume", "--out", "run"]).exit_code == 0
    assert not list(Path("run").glob(".*"))


@pytest.mark.parametrize(("size", "file"), [(6000, "model.safetensors"), (51200, "evaluation.safetensors")])
def test_a_full_disk_while_a_run_is_evaluated_or_taken_over(trained: Path, size: int, file: str) -> None:
    run = Path(shutil.copytree(trained, "run"))
    before = contents(run)
    with no_file_above(size):
        assert f"run/{file} cannot be read or written: " in refused("evaluate", "run")
        message = refused(*TRAIN_TINY, "--out", "posterior", "--particles", "2", "--map", "run")
    assert contents(run).keys() == before.keys()
    assert contents(run)["result.json"] == before["result.json"]
    assert f"posterior/.map.partial/{file} cannot be read or written: " in message
    assert not Path("posterior").exists()


DAMAGED = ("", "{", "[]", "{}", "null")


@pytest.mark.parametrize("text", DAMAGED)
def test_a_damaged_result_is_named_with_what_to_do(trained: Path, text: str) -> None:
    run = Path(shutil.copytree(trained, "run"))
    (run / "result.json").write_text(text)
    for command in (["evaluate", "run"], ["train", "--resume", "--quiet", "--out", "run"]):
        message = refused(*command)
        assert "run/result.json is damaged: " in message
        assert message.endswith("Remove it, then bayestrain train --resume makes it anew.")
    (run / "checkpoint-last.pt").unlink()
    assert refused("evaluate", "run").endswith("Train anew with --overwrite.")


def test_a_result_that_was_removed_is_made_anew(trained: Path) -> None:
    run = Path(shutil.copytree(trained, "run"))
    (run / "result.json").unlink()
    assert CliRunner().invoke(app, ["train", "--resume", "--quiet", "--out", "run"]).exit_code == 0
    old, new = (json.loads((folder / "result.json").read_text()) for folder in (trained, run))
    assert all(new[key] == old[key] for key in ("accuracy", "log_likelihood", "params", "ranks", "command"))


@pytest.mark.parametrize("text", DAMAGED)
def test_a_run_with_damaged_files_is_not_resumed(trained: Path, text: str) -> None:
    run = Path(shutil.copytree(trained, "run"))
    (run / "result.json").unlink()
    resume = ("train", "--resume", "--quiet", "--out", "run")
    environment = (run / "environment.json").read_text()
    (run / "environment.json").write_text(text)
    message = refused(*resume)
    assert "run/environment.json is damaged: " in message
    assert message.endswith("Remove it, then go on with --resume.")
    (run / "environment.json").write_text(environment)
    if text:
        history = (run / "history.jsonl").read_text()
        (run / "history.jsonl").write_text(f"{text}\n{history}")
        assert refused(*resume).endswith(
            "run/history.jsonl, line 1 is no epoch. Remove the line, then go on with --resume."
        )
        (run / "history.jsonl").write_text(history)
    (run / "checkpoint-last.pt").write_text(text)
    assert refused(*resume).endswith("Remove it to begin this part of the run anew.")


def test_a_description_without_classes(trained: Path) -> None:
    run = Path(shutil.copytree(trained, "run"))
    description = json.loads((run / "model.json").read_text())
    del description["classes"]
    (run / "model.json").write_text(json.dumps(description))
    for command in (["inspect", "run", "--plan"], ["evaluate", "run"]):
        assert "model.json says nothing of classes" in refused(*command)


def test_descriptions_that_lack_something() -> None:
    Path("model.json").write_text('{"format": 1, "layers": {}}')
    assert "says nothing of params, dense_params" in refused("inspect", "model.json")
    Path("report.html").write_text("")
    assert "is no saved model" in refused("inspect", "report.html")


def test_nothing_to_resume() -> None:
    assert "There is nothing to resume in runs/mnist-mini-seed0" in refused("train", "--resume")
    assert "There is nothing to resume in nowhere" in refused("train", "--resume", "--out", "nowhere")
    assert "use one of them" in refused("train", "--resume", "--overwrite")
    assert not Path("runs").exists()
    assert not Path("nowhere").exists()


def test_resume_with_another_config() -> None:
    run = a_run("run", finished=False, overrides=("fit.lr=0.5",))
    before = contents(run)
    message = refused("train", "mnist-mini", "--resume", "--out", "run")
    assert "begun with another config" in message
    assert "fit.lr: 0.5, now" in message
    assert "bayestrain train --resume --out run" in message
    assert "fit.epochs" in refused("train", "--resume", "--out", "run", "--set", "fit.epochs=77")
    assert "experiment.seed: 0, now 3" in refused("train", "--resume", "--out", "run", "--seed", "3")
    assert contents(run) == before


def test_devices_that_are_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr("torch.backends.mps.is_available", lambda: False)
    for device in ("cuda", "cuda:1", "mps"):
        assert f"--device {device}: " in refused("train", "--device", device)
    assert "got gpu" in refused("train", "--device", "gpu")
    assert 'Did you mean "cuda"?' in refused("train", "--device", "cud")
    assert not Path("runs").exists()


def test_a_gpu_number_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    assert "--device cuda:2: there are 2 GPUs" in refused("train", "--device", "cuda:2")


def test_damaged_data_files() -> None:
    """A folder of the user's with MNIST files that are too short, or of the right size with wrong bytes."""
    for name, file in (("short", None), ("wrong", datasets.MNIST.files[0])):
        folder = Path(name)
        folder.mkdir()
        for official in datasets.MNIST.files:
            (folder / official.name).write_bytes(b"\0" * (official.size if file else 100))
        message = refused("train", "mnist", "--set", f"data.folder={folder}", "--out", f"run-{name}")
        assert datasets.MNIST.files[0].name in message
        assert not Path(f"run-{name}").exists()
        shutil.rmtree(folder)


def test_data_that_does_not_exist() -> None:
    assert "there is no data set 'mnits'" in refused("data", "get", "mnits")


def test_inspect_report_and_predict_want_runs() -> None:
    Path("empty").mkdir()
    Image.new("L", (28, 28)).save("a.png")
    assert "nowhere does not exist" in refused("inspect", "nowhere")
    assert "There is no saved model at empty" in refused("inspect", "empty")
    assert "nowhere does not exist" in refused("predict", "nowhere", "a.png")
    assert "There is no saved model at empty" in refused("predict", "empty", "a.png")
    assert "empty" in refused("report", "empty")
    Path("empty/model.json").write_text("{")
    assert "is not valid JSON" in refused("inspect", "empty")
