"""Configs: what they refuse and in which words, where a mistake stands, and that nothing is lost in writing."""

from __future__ import annotations

import dataclasses
import tomllib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from bayestrain import data, models
from bayestrain.convert import TensorizeConfig
from bayestrain.errors import ConfigError
from bayestrain.layers.start import INITS
from bayestrain.prior import UPDATES
from bayestrain.train import toml
from bayestrain.train.config import (
    IMAGES,
    INPUTS,
    SECTIONS,
    FitConfig,
    PriorConfig,
    RunConfig,
    TensorizeSettings,
    all_settings,
    differences,
)

SHIPPED = [(name, preset) for name in toml.names() for preset in toml.presets(name)]


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "my.toml"
        path.write_text(text)
        return path

    return write


@pytest.mark.parametrize(("name", "preset"), SHIPPED)
def test_every_shipped_config_loads_and_is_written_back_without_loss(name: str, preset: str) -> None:
    config = toml.named(name, preset)
    assert (config.experiment.name, config.experiment.preset) == (name, preset)
    again = RunConfig.from_dict(tomllib.loads(toml.dumps(config)))
    assert again == config
    assert hash(again) == hash(config)
    assert RunConfig.from_dict(config.to_dict()) == config


def test_the_names_are_the_files() -> None:
    stems = {file.name.removesuffix(".toml") for file in toml.CONFIGS.iterdir()}
    assert stems == {name if preset == "default" else f"{name}.{preset}" for name, preset in SHIPPED}
    assert [name for name, preset in SHIPPED if preset == "paper"] == ["mnist", "cifar10-cnn", "cifar10-resnet110"]


@pytest.mark.parametrize("name", toml.names())
def test_every_experiment_has_a_line_that_fits_into_the_help(name: str) -> None:
    assert 10 < len(toml.about(name)) < 57


def test_the_paper_presets_have_the_papers_prior_and_start() -> None:
    for name, max_rank in (("mnist", 20), ("cifar10-cnn", 30), ("cifar10-resnet110", 20)):
        config = toml.named(name, "paper")
        assert (config.prior.a, config.prior.b, config.prior.weight) == (1.0, 5.0, 1.0)
        assert (config.tensorize.max_rank, config.tensorize.init) == (max_rank, "paper")
    assert toml.named("cifar10-resnet110", "paper").experiment.model == "resnet110_keras"
    modes = toml.named("mnist", "paper").tensorize.modes
    assert modes == {"1": ((7, 4, 7, 4), (5, 5, 5, 5)), "3": ((25, 25), (5, 2))}


def test_config_knows_the_same_networks_data_sets_and_choices_as_the_library() -> None:
    assert set(INPUTS) == set(models.BUILDERS)
    assert {entry.name: entry.shape for entry in data.catalog()} == IMAGES
    choices = {(section, field.name): rule.choices for section, field, rule in all_settings()}
    assert choices["tensorize", "init"] == INITS
    assert choices["prior", "update"] == UPDATES
    assert PriorConfig().floor == 1e-3
    assert TensorizeSettings().max_rank == TensorizeConfig().max_rank


def test_every_setting_is_explained() -> None:
    for section, field, rule in all_settings():
        assert rule.doc, f"{section}.{field.name}"
        assert rule.allowed(str(field.type)), f"{section}.{field.name}"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('base = "mnist"\n[fit]\nepocs = 3\n', ["my.toml, line 3", '"fit.epocs"', 'Did you mean "fit.epochs"?', "lr,"]),
        ('base = "mnist"\n\n[ft]\nlr = 3', ["line 3", '"ft"', 'Did you mean "fit"?', "sections are experiment, data"]),
        ('base = "mnist"\nlr = 3', ["line 2", 'Did you mean "fit.lr"?']),
        ('bse = "mnist"', ["line 1", 'Did you mean "base"?']),
        ('base = "mnits"', ["line 1", 'Did you mean "mnist"?', "mnist.paper"]),
        ("base = 3", ["line 1", "base must be one of"]),
        ('base = "mnist"\nfit.lr = -1', ["line 2", "fit.lr must be a number above 0, got -1."]),
        ('base = "mnist"\nfit = { lr = true }', ["line 2", "fit.lr must be a number above 0, got true."]),
        ('base = "mnist"\nfit = 3', ["line 2", "fit must be a section"]),
        ('base = "mnist"\n[fit]\nlr = nan', ["line 3", "must be a number above 0, got nan."]),
        ('base = "mnist"\n[fit]\nepochs = 3.0', ["line 3", "must be a whole number of at least 1, got 3.0."]),
        ('base = "mnist"\n[fit]\nepochs = "3"', ["line 3", 'must be a whole number of at least 1, got "3".']),
        ('base = "mnist"\n[data]\nflip = 1', ["line 3", "must be true or false, got 1."]),
        ('base = "mnist"\n[data]\nvalidation_fraction = 1', ["number of at least 0 and below 1, got 1."]),
        (
            'base = "mnist"\n[fit]\noptimizer = "adm"',
            ["line 3", 'one of "adam", "adamw", "sgd", "muon", got "adm".', 'Did you mean "adam"?'],
        ),
        (
            'base = "mnist"\n[fit]\nmilestones = [\n0.5,\n1.5,\n]',
            ["line 3", "list of numbers, each above 0 and below 1"],
        ),
        ('base = "mnist"\n[tensorize]\nkeep_dense = "a"', ["line 3", "must be a list of texts"]),
        (
            'base = "mnist"\n[tensorize.modes]\n"1" = [[7], [5]]\n"3" = [3]',
            ["line 4", 'tensorize.modes."3" must be [[in'],
        ),
        (
            'base = "mnist"\n[data]\nname = "cifar10"',
            ["my.toml", "takes 1x28x28 images", "are 3x32x32", '"mnist-mini"'],
        ),
        ('base = "mnist"\n[fit]\nschedule = "step"', ["my.toml", "needs fit.milestones"]),
        ('base = "mnist"\n[fit]\nmilestones = [0.7, 0.5]', ["fit.milestones must rise"]),
        ("[fit]\nlr = 1", ["no value for experiment.name, experiment.model, data.name", 'base = "mnist"']),
        ('base = "mnist"\n[fit]\nlr = = 1', ["my.toml, line 3: not valid TOML"]),
        ('base = "mnist"\n[fit]\nlr = [1\n', ["my.toml, line 3: not valid TOML", "Unclosed array"]),
        ('base = "mnist"\n[fit]\nlr = 1\nlr = 2', ["my.toml, line 4: not valid TOML", "overwrite"]),
    ],
)
def test_a_mistake_in_a_file_is_told_with_its_place_and_its_cure(write, text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        toml.load(write(text))
    for word in words:
        assert word in str(error.value)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.toml cannot be read: No such file or directory\."):
        toml.load(tmp_path / "no.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        toml.load(tmp_path)
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=r"binary\.toml is no TOML file: it must be text in UTF-8"):
        toml.load(tmp_path / "binary.toml")


def test_a_file_overrides_its_base_and_set_overrides_the_file(write) -> None:
    path = write('base = "mnist.paper"\n[fit]\nepochs = 7\nlr = 1\n')
    config = toml.load(path, ["fit.epochs=2", "fit.optimizer=sgd", "data.folder=/tmp/x y", "experiment.name=3"])
    paper = toml.named("mnist", "paper")
    expected = paper.replace("fit", epochs=2, lr=1.0, optimizer="sgd").replace("data", folder="/tmp/x y")
    assert config == expected.replace("experiment", name="3")
    assert isinstance(config.fit.lr, float)
    assert toml.load(write("fit.epochs = 7"), base="mnist").fit.epochs == 7
    with pytest.raises(ConfigError, match='line 1: the file says base = "mnist" itself'):
        toml.load(write('base = "mnist"'), base="cifar10-cnn")


def test_modes_of_a_file_replace_those_of_its_base_and_set_changes_one_layer(write) -> None:
    path = write('base = "mnist"\n[tensorize.modes]\n"1" = [[28, 28], [25, 25]]\n')
    assert toml.load(path).tensorize.modes == {"1": ((28, 28), (25, 25))}
    changed = toml.load(path, ['tensorize.modes."3"=[[25,25],[5,2]]']).tensorize.modes
    assert changed == {"1": ((28, 28), (25, 25)), "3": ((25, 25), (5, 2))}
    assert toml.load(path, ["tensorize.modes={}"]).tensorize.modes == {}


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("fit.epochs=three", '--set fit.epochs=three: fit.epochs must be a whole number of at least 1, got "three".'),
        ("fit.epochs=2.5", "--set fit.epochs=2.5: fit.epochs must be a whole number of at least 1, got 2.5."),
        ("fit.epocs=3", '--set fit.epocs=3: There is no setting "fit.epocs". Did you mean "fit.epochs"?'),
        ("epochs=3", '--set epochs=3: There is no setting "epochs". Did you mean "fit.epochs"?'),
        ("fit.lr.x=3", '--set fit.lr.x=3: There is no setting "fit.lr.x".'),
        ("fit.epochs", "--set fit.epochs: write section.key=value, for example --set fit.epochs=3."),
        ("=3", "--set =3: write section.key=value"),
        ("fit.milestones=[0.5", "--set fit.milestones=[0.5: fit.milestones must be a list of numbers"),
        ("tensorize.modes.1=3", '--set tensorize.modes.1=3: tensorize.modes."1" must be [[in modes], [out modes]]'),
        ("fit.lr=1\nfit.epochs=2", "fit.lr must be a number above 0"),
    ],
)
def test_a_mistake_in_set_names_the_set(override: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        toml.named("mnist", overrides=[override])
    assert message in str(error.value)


def test_unknown_names_and_presets() -> None:
    with pytest.raises(
        ConfigError, match=r'no experiment "mnits"\. Did you mean "mnist"\? The experiments are mnist-mini'
    ):
        toml.named("mnits")
    with pytest.raises(ConfigError, match=r'no preset "papper"\. Did you mean "paper"\?'):
        toml.named("mnist", "papper")
    with pytest.raises(ConfigError, match=r'mnist-mini has no preset "paper"\. Those that do are mnist, cifar10-cnn'):
        toml.named("mnist-mini", "paper")


def test_dataclasses_check_themselves_and_are_frozen() -> None:
    with pytest.raises(ConfigError, match=r"prior\.floor must be a number above 0 and below 1, got 2"):
        PriorConfig(floor=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        PriorConfig().a = 3.0  # type: ignore[misc]
    assert TensorizeSettings(keep_dense=["a"]).keep_dense == ("a",)  # type: ignore[arg-type]


def test_numbers_of_numpy_become_those_of_python() -> None:
    config = FitConfig(epochs=np.int64(3), batch_size=np.uint8(16), lr=np.float32(0.5), milestones=[np.float64(0.5)])
    assert config == FitConfig(epochs=3, batch_size=16, lr=0.5, milestones=(0.5,))
    assert [type(value) for value in (config.epochs, config.lr, config.milestones[0])] == [int, float, float]
    modes = TensorizeSettings(modes={"1": [np.array([7, 4]).tolist(), tuple(np.array([5, 5]))]}).modes
    assert modes == {"1": ((7, 4), (5, 5))}
    assert all(type(mode) is int for pair in modes["1"] for mode in pair)
    with pytest.raises(ConfigError, match=r"needs fit\.milestones"):
        FitConfig(epochs=1, batch_size=1, lr=1.0, schedule="step")
    for wrong in (np.float64(1.0), np.bool_(True), np.array(1)):
        with pytest.raises(ConfigError, match=r"fit\.epochs must be a whole number"):
            FitConfig(epochs=wrong, batch_size=1, lr=1.0)


def test_differences_are_named() -> None:
    old = toml.named("mnist")
    new = old.replace("fit", lr=0.5).replace("data", flip=True)
    assert differences(old, old) == []
    assert differences(old, new) == ["data.flip: false, now true", f"fit.lr: {old.fit.lr}, now 0.5"]


@given(st.text(), st.lists(st.text()), st.dictionaries(st.text(), st.just([[2, 3], [4]])), st.floats(1e-300, 1e300))
def test_any_text_and_number_survives_writing(name: str, dense: list[str], modes: dict[str, object], lr: float) -> None:
    config = toml.named("mnist").replace("experiment", name=name).replace("fit", lr=lr)
    config = config.replace("tensorize", keep_dense=dense, modes=modes)
    assert RunConfig.from_dict(tomllib.loads(toml.dumps(config))) == config


def test_lines_are_those_of_keys_not_of_look_alikes() -> None:
    text = (
        "# lr = 1\n"
        'a = """\n[fit]\nlr = 2\n"""\n'
        "[fit] # lr = 3\n"
        'b = [ # comment\n  "lr = 4",\n]\n'
        '"lr" = 5\n'
        "[x.y]\n"
        "[[z]]\nlr = 6\n"
    )
    lines = toml.lines_of_keys(text)
    assert lines["a",] == 2
    assert lines["fit",] == 6
    assert lines["fit", "b"] == 7
    assert lines["fit", "lr"] == 10
    assert lines["x", "y"] == 11
    assert lines["z", "lr"] == 13
    assert set(SECTIONS) == {"experiment", "data", "tensorize", "prior", "fit", "posterior"}
