"""Models of `transformers` with random weights: converted, trained, compacted, generating (io saves and loads them)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import bayestrain as bt

# A normalisation often follows a residual sum, of which tracing cannot see that other layers feed it.
pytestmark = pytest.mark.filterwarnings("ignore::bayestrain.errors.HoldWarning")
transformers = pytest.importorskip("transformers")

SYMBOLS = 500
TEXT = torch.randint(0, SYMBOLS, (4, 16), generator=torch.Generator().manual_seed(0))
SIZES = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
LANGUAGE = {"vocab_size": SYMBOLS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 0}


def bert() -> nn.Module:
    return transformers.BertForSequenceClassification(transformers.BertConfig(**SIZES, **LANGUAGE, num_labels=3))


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(**LANGUAGE, n_embd=64, n_layer=2, n_head=4, n_positions=64)
    return transformers.GPT2LMHeadModel(config)


def vit() -> nn.Module:
    config = transformers.ViTConfig(**SIZES, image_size=32, patch_size=8, num_labels=3)
    return transformers.ViTForImageClassification(config)


def llama(tied: bool = False) -> nn.Module:
    config = transformers.LlamaConfig(**SIZES, **LANGUAGE, num_key_value_heads=2, tie_word_embeddings=tied)
    return transformers.LlamaForCausalLM(config)


def t5() -> nn.Module:
    sizes = {"d_model": 64, "d_kv": 16, "d_ff": 128, "num_layers": 2, "num_heads": 4}
    config = transformers.T5Config(vocab_size=SYMBOLS, **sizes, decoder_start_token_id=0)
    return transformers.T5ForConditionalGeneration(config)


def mixtral() -> nn.Module:
    config = transformers.MixtralConfig(**SIZES, **LANGUAGE, num_key_value_heads=2, num_local_experts=4)
    return transformers.MixtralForCausalLM(config)


CLASSES = torch.tensor([0, 1, 2, 0])
PICTURES = torch.randn(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))
MODELS: dict[str, tuple[Callable[[], nn.Module], dict[str, Tensor], int]] = {
    "bert": (bert, {"input_ids": TEXT, "labels": CLASSES}, 3),
    "gpt2": (gpt2, {"input_ids": TEXT, "labels": TEXT}, 8),
    "vit": (vit, {"pixel_values": PICTURES, "labels": CLASSES}, 5),
    "llama": (llama, {"input_ids": TEXT, "labels": TEXT}, 8),
    "llama, tied": (lambda: llama(tied=True), {"input_ids": TEXT, "labels": TEXT}, 8),
    "t5": (t5, {"input_ids": TEXT, "labels": TEXT}, 8),
    "mixtral": (mixtral, {"input_ids": TEXT, "labels": TEXT}, 1),
}
"""How each is built, a batch, and how many times smaller it becomes at least; the experts of Mixtral stay dense."""


@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_converted_trained_and_compacted(name: str) -> None:
    build, batch, ratio = MODELS[name]
    torch.manual_seed(0)
    model: Any = build()
    dense = bt.count_parameters(model)
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    prior = bt.RankPrior(model, num_data=1000, warmup_steps=10)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for step in range(8):
        likelihood = model(**batch).loss
        (likelihood + prior.loss()).backward()
        optimizer.step()
        optimizer.zero_grad()
        prior.step()
        losses.append(float(likelihood.detach()))
        if step == 5:
            bt.compact_(model, 0.3, rule="contribution", optimizer=optimizer)
    assert losses[-1] < losses[0]
    prior.remove_()
    assert bt.count_parameters(model) < dense / ratio
    if model.eval().can_generate():
        written = model.generate(TEXT[:, :5], max_new_tokens=6, do_sample=False, pad_token_id=0)
        assert written.shape[1] > 1


def test_experts_stay_dense_are_listed_with_their_share_and_are_factorised_by_name() -> None:
    model: Any = mixtral()
    summary = bt.tensorize_(model, bt.TensorizeConfig(max_rank=4))
    kept = {row.name: row for row in summary.kept}
    assert "no factorised layer stands for MixtralExperts" in kept["model.layers.0.mlp.experts.gate_up_proj"].reason
    assert sum(row.parameters for row in summary.kept) > bt.count_parameters(model) / 2
    model, dense = mixtral(), bt.count_parameters(mixtral())
    bt.tensorize_(model, bt.TensorizeConfig(max_rank=4), include=["all-linear", "*.experts.*", "*.embed_tokens"])
    assert bt.count_parameters(model) < dense / 8
    assert model(input_ids=TEXT, labels=TEXT).loss.isfinite()
