"""`save_pretrained` and `from_pretrained`: small files, the same bits, and no other network without BayesTrain."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from fit_kit import assert_same
from processes import python
from safetensors.torch import load_file, save_file
from test_transformers import MODELS, TEXT, gpt2, llama

import bayestrain as bt
from bayestrain.errors import BayesTrainError, ConfigError, DataError

pytestmark = pytest.mark.filterwarnings("ignore::bayestrain.errors.HoldWarning")
transformers = pytest.importorskip("transformers")

INCLUDE = {"mixtral": ["all-linear", "*.experts.*", "*.embed_tokens"]}


def small(name: str) -> tuple[Any, dict[str, Any]]:
    build, batch, _ = MODELS[name]
    torch.manual_seed(0)
    model = build()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4), include=INCLUDE.get(name))
    bt.compact_(model, 0.5)
    return model.eval(), batch


@pytest.mark.parametrize("name", MODELS)
def test_the_same_bits_at_the_small_size(name: str, tmp_path: Path) -> None:
    model, batch = small(name)
    sizes = []
    for folder, options in ((tmp_path / "one", {}), (tmp_path / "shards", {"max_shard_size": "16KB"})):
        model.save_pretrained(folder, **options)
        found, info = type(model).from_pretrained(folder, output_loading_info=True)
        assert not any(info.values()), info
        assert_same(found, model)
        assert bt.ranks(found) == bt.ranks(model)
        with torch.no_grad():
            assert torch.equal(found(**batch).logits, model(**batch).logits)
        files = list(folder.glob("*.safetensors"))
        assert not list(folder.glob("*.bin"))
        sizes.append(sum(file.stat().st_size for file in files))
    assert len(files) > 1
    assert max(sizes) < 4 * bt.count_parameters(model) + 25_000  # with names and shapes
    base = transformers.AutoModel.from_pretrained(tmp_path / "one")  # the same without its head, if it has one
    assert bt.ranks(base).items() <= {
        (key.removeprefix(f"{model.base_model_prefix}."), value) for key, value in bt.ranks(model).items()
    }
    model.half().save_pretrained(tmp_path / "half")
    half = type(model).from_pretrained(tmp_path / "half")
    assert half.dtype == torch.float16
    assert_same(half, model)
    half.float()  # it is an ordinary model, not what the library calls quantised
    half.save_pretrained(tmp_path / "again")
    assert_same(type(model).from_pretrained(tmp_path / "again"), half)


def test_a_head_is_put_on_a_base_model_that_shares_its_table(tmp_path: Path) -> None:
    model, batch = small("gpt2")
    model.transformer.save_pretrained(tmp_path)
    found = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(found(**batch).logits, model(**batch).logits)


def test_lambda_is_in_the_files_while_there_is_a_prior(tmp_path: Path) -> None:
    model: Any = gpt2()
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    prior = bt.RankPrior(model, num_data=100)
    for _ in range(3):
        prior.step()
    bt.compact_(model, 0.5, rule="contribution")
    model.save_pretrained(tmp_path)
    found = transformers.GPT2LMHeadModel.from_pretrained(tmp_path)
    assert_same(found, model)
    expected = bt.RankPrior(model, num_data=100).log_prob()
    assert torch.equal(bt.RankPrior(found, num_data=100).log_prob(), expected)  # with the ranks it started with


def test_nothing_stays_behind_and_dense_models_are_left_alone(tmp_path: Path) -> None:
    model, dense = small("bert")[0], gpt2()
    before = model.config.to_json_string()
    model.save_pretrained(tmp_path / "small")
    assert json.loads(model.config.to_json_string()).keys() - json.loads(before).keys() <= {"architectures", "dtype"}
    assert "save_pretrained" not in vars(model.config)
    dense.save_pretrained(tmp_path / "dense")
    written = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert not {"quantization_config", "transformers_weights"} & written.keys()
    assert_same(transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "dense"), dense)
    model.config.quantization_config = {"quant_method": "torchao"}
    with pytest.raises(ConfigError, match=r"quantised, too.*bayestrain\.save"):
        model.save_pretrained(tmp_path / "other")


SCRIPT = """
import sys
{first}
assert "torch" not in sys.modules and "transformers" not in sys.modules
import transformers
from transformers import AutoModelForCausalLM, GPT2LMHeadModel
for kind in (AutoModelForCausalLM, GPT2LMHeadModel) if "bayestrain" not in sys.modules else ():
    try:
        print(kind.from_pretrained({folder!r}))
    except ValueError as error:
        assert "Run `import bayestrain` before loading it" in str(error), error
    else:
        raise AssertionError("another network was loaded")
import bayestrain, torch
for kind in (AutoModelForCausalLM, GPT2LMHeadModel):
    model = kind.from_pretrained({folder!r})
    with torch.no_grad():
        logits = model(torch.tensor({text})).logits
    assert torch.equal(logits, torch.load({folder!r} + "/logits.pt"))
print("ok", bayestrain.count_parameters(model))
"""


@pytest.mark.parametrize("first", ["", "import bayestrain"], ids=["without", "with"])
def test_a_process_without_bayestrain_refuses(first: str, tmp_path: Path) -> None:
    model, _ = small("gpt2")
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        torch.save(model(TEXT).logits, tmp_path / "logits.pt")
    script = SCRIPT.format(first=first, folder=str(tmp_path), text=TEXT.tolist())
    assert python("-c", script).stdout.strip() == f"ok {bt.count_parameters(model)}"


def test_tables_that_are_factorised_refuse_another_size() -> None:
    model: Any = llama(tied=True)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4), exclude=["model.embed_tokens", "lm_head"])
    model.resize_token_embeddings(520, mean_resizing=False)
    assert model(TEXT).logits.shape[-1] == 520
    model = llama(tied=True)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    assert model.resize_token_embeddings() is model.get_input_embeddings()
    with pytest.raises(TypeError, match=r"Old embeddings are of type .*TensorEmbedding"):
        model.resize_token_embeddings(520)


def test_a_wrong_description_is_refused(tmp_path: Path) -> None:
    model, _ = small("gpt2")
    model.save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    good = json.loads(file.read_text())
    weights = good["quantization_config"]["weights"]
    name, about = next(iter(weights.items()))
    for wrong in (
        {"version": 99}, {"weights": None}, {"weights": {name: {}}}, {"weights": {name: about | {"ranks": [-1]}}},
        {"weights": {name: about | {"ranks": [10**40] * len(about["ranks"])}}},
        {"weights": {name: about | {"ranks": "many"}}}, {"weights": {name: about | {"format": "mine"}}},
        {"weights": {name: about | {"equation": "a, b -> ab"}}},
        {"weights": {name: about | {"layout": about["layout"] | {"shape": [3, 5], "axes": [3, 5]}}}},
    ):  # fmt: skip
        file.write_text(json.dumps(good | {"quantization_config": good["quantization_config"] | wrong}))
        with pytest.raises(BayesTrainError):
            type(model).from_pretrained(tmp_path)
    lying = {"weights": weights | {name: about | {"ranks": [10**7] * len(about["ranks"])}}}  # the tensors differ
    file.write_text(json.dumps(good | {"quantization_config": good["quantization_config"] | lying}))
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path)
    file.write_text(json.dumps(good))
    tensors = load_file(tmp_path / "model.safetensors")
    core = f"{name}.cores.0"
    save_file({**tensors, core: tensors[core].repeat(2, 1)}, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(RuntimeError, match="ignore_mismatched_sizes"):
        type(model).from_pretrained(tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_cores_that_no_description_names_are_refused(name: str, tmp_path: Path) -> None:
    model, _ = small(name)
    model.save_pretrained(tmp_path)
    found = type(model).from_pretrained(tmp_path)
    for config in (model.config, type(model.config)(**model.config.to_diff_dict()), found.config):
        with pytest.raises(DataError, match=r"cores of '.*', which the config does not describe"):
            type(model).from_pretrained(tmp_path, config=config)
    config = transformers.AutoConfig.from_pretrained(tmp_path)
    assert_same(type(model).from_pretrained(tmp_path, config=config), model)
    file = tmp_path / "config.json"
    good = json.loads(file.read_text())
    weights = good["quantization_config"]["weights"]
    first, *others = weights
    for wrong in ({key: weights[key] for key in others}, {"other." + first: weights[first]} | weights, {}):
        wrong.pop(first, None)
        file.write_text(json.dumps(good | {"quantization_config": good["quantization_config"] | {"weights": wrong}}))
        with pytest.raises(DataError, match="which the config does not describe"):
            transformers.AutoModelForCausalLM.from_pretrained(tmp_path)


def test_a_config_that_describes_another_model_is_not_saved(tmp_path: Path) -> None:
    small("gpt2")[0].save_pretrained(tmp_path / "small")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "small")
    dense = transformers.AutoModelForCausalLM.from_config(config)
    dense.save_pretrained(tmp_path / "dense")
    written = json.loads((tmp_path / "dense" / "config.json").read_text())
    assert not {"quantization_config", "transformers_weights"} & written.keys()
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense"), dense)
    bt.tensorize_(dense, bt.TensorizeConfig(max_rank=2))
    dense.save_pretrained(tmp_path / "again")
    assert_same(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "again"), dense)


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_plain_models_say_how_they_are_saved(name: str, tmp_path: Path) -> None:
    model, batch = small(name)
    plain: Any = bt.to_plain(model)
    for part in (plain, plain.base_model):
        with pytest.raises(ConfigError, match=r"to_plain has made.*to_plain was given"):
            part.save_pretrained(tmp_path / "plain")
    assert not (tmp_path / "plain").exists()
    torch.save(plain, tmp_path / "plain.pt")
    found = torch.load(tmp_path / "plain.pt", weights_only=False)
    with torch.no_grad():
        torch.testing.assert_close(found(**batch).logits, model(**batch).logits, atol=1e-4, rtol=1e-4)
    model.save_pretrained(tmp_path / "model")  # which to_plain was given
    dense: Any = bt.to_plain(gpt2())
    dense.save_pretrained(tmp_path / "dense")
