"""The language model under transformers: saved, loaded, generating, trained, grown."""

import json
from dataclasses import asdict
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("transformers", reason="pip install '.[language]'")

from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    SequenceBiasLogitsProcessor,
    Trainer,
    TrainingArguments,
)

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, grow
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    byte_tokenizer,
    load_language_model,
    save_language_model,
    transformer_lm,
)
from tokenformer_vit.models import LMConfig, TokenFormerLM
from tokenformer_vit.models.sizes import find_layers

SHAPE = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
KINDS = {
    "rotary": {"rotary_share": 0.5},
    "learned": {"positions": "learned"},
    "untied": {"rotary_share": 0.5, "tie_embeddings": False},
    "softmax": {"rotary_share": 0.5, "theta": "softmax", "pattention_args": {"learn_tau": True}},
}
SEARCHES = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
}


def build(**changes):
    model = TokenFormerForCausalLM(TokenFormerConfig(**{**SHAPE, **KINDS["rotary"], **changes}))
    model.model.embedding.weight.data.mul_(20)  # so that the token at hand is not drowned
    return model.eval()


def reload(model, folder, **kwargs):
    model.save_pretrained(folder)
    loaded, found = load(folder, **kwargs)
    assert not any(found.values()), found
    return loaded


def load(folder, **kwargs) -> Any:
    """Return a model, and transformers' report about its weights."""
    return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_saved_model_is_the_same_model(kind, tmp_path):
    model, tokens = build(**kind), torch.randint(61, (2, 9))
    for layer in (model.model.blocks[0].mlp, model.model.blocks[1].attn.key):
        layer.tau.data.mul_(1.7)  # as after growth: not what the number of pairs says
    loaded = reload(model, tmp_path)
    assert type(loaded) is TokenFormerForCausalLM
    assert not loaded.training
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert asdict(loaded.config) == asdict(AutoConfig.from_pretrained(tmp_path))
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_tokenformer.py",
    }


def test_it_is_the_model_it_wraps():
    plain = TokenFormerLM(LMConfig(**SHAPE, rotary_share=0.5)).eval()
    model = TokenFormerForCausalLM(TokenFormerConfig(**SHAPE, rotary_share=0.5)).eval()
    model.model.load_state_dict(plain.state_dict())
    tokens = torch.randint(61, (2, 9))
    torch.testing.assert_close(model(tokens).logits, plain(tokens), rtol=0, atol=0)
    torch.testing.assert_close(model(tokens, return_dict=False)[0], plain(tokens))
    last = model(tokens, logits_to_keep=1).logits
    torch.testing.assert_close(last, plain(tokens)[:, -1:])
    chosen = model(tokens, logits_to_keep=torch.tensor([0, 4])).logits
    torch.testing.assert_close(chosen, plain(tokens)[:, [0, 4]])


def test_the_configuration_answers_to_the_names_of_transformers():
    config = TokenFormerConfig(
        hidden_size=64,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=99,
        tie_word_embeddings=False,
    )
    ours = LMConfig(embed_dim=64, depth=3, num_heads=4, context_length=99, tie_embeddings=False)
    assert asdict(config).items() >= asdict(ours).items()
    # Other libraries, such as peft, look for these names in the dict.
    assert config.to_dict().items() >= {"hidden_size": 64, "tie_word_embeddings": False}.items()
    assert TokenFormerConfig().to_dict()["tie_word_embeddings"] is True
    assert config != TokenFormerConfig(hidden_size=64, num_heads=4)
    assert TokenFormerConfig(**config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(InputError, match=r"hidden_size is 32, but .* is 64: give one"):
        TokenFormerConfig(embed_dim=64, hidden_size=32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tau_stays_float32(dtype, tmp_path):
    model = build()
    tau = model.model.blocks[0].mlp.tau.clone()
    assert tau != tau.to(dtype)
    low = reload(model, tmp_path, dtype=dtype)
    for each in (low, build().to(dtype)):
        assert each.dtype == dtype
        torch.testing.assert_close(each.model.blocks[0].mlp.tau, tau, rtol=0, atol=0)
    assert reload(low, tmp_path / "low").dtype == dtype


def test_what_a_checkpoint_lacks_is_drawn_and_the_rest_is_not(tmp_path):
    model, absent = build(nested=(0.5,)), "model.blocks.1.mlp.key_param_tokens"
    for layer in find_layers(model).values():
        layer.tau.mul_(1.7)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors[absent]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    loaded, found = load(tmp_path)
    assert set(found["missing_keys"]) == {absent}
    own = loaded.state_dict()
    torch.testing.assert_close({name: own[name] for name in tensors}, tensors, rtol=0, atol=0)
    assert own[absent].std().item() == pytest.approx(32**-0.5, rel=0.1)
    with pytest.raises(InputError, match=rf"{absent} is missing"):
        load_language_model(tmp_path)


@pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)
@pytest.mark.parametrize("kind", ["rotary", "learned"])
def test_with_and_without_a_cache_it_writes_the_same(kind, search, seed):
    model = build(**KINDS[kind]).double()
    one = {"input_ids": torch.randint(2, 61, (1, 7))}
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[0, :4] = mask[2, :1] = 0
    three = {"input_ids": torch.randint(2, 61, (3, 9)), "attention_mask": mask}
    for inputs in (one, three):
        written = []
        for use_cache in (True, False):
            torch.manual_seed(seed)
            written.append(
                model.generate(
                    **inputs, **search, max_new_tokens=12, use_cache=use_cache, pad_token_id=0
                )
            )
        assert torch.equal(*written)
        assert written[0].shape[1] == inputs["input_ids"].shape[1] + 12


@pytest.mark.parametrize("how", ["plain", "checkpointing", "smoothing"])
def test_the_trainer_trains_it(how, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model = TokenFormerForCausalLM(TokenFormerConfig(**SHAPE, rotary_share=0.5))
    tokens = torch.randint(61, (8, 16))
    data = [{"input_ids": row, "labels": row, "attention_mask": row > -1} for row in tokens]
    trainer = Trainer(
        model,
        TrainingArguments(
            str(tmp_path),
            max_steps=24,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            gradient_checkpointing=how == "checkpointing",
            label_smoothing_factor=0.1 if how == "smoothing" else 0.0,
            save_steps=24,
            logging_steps=1,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        ),
        train_dataset=data,
        eval_dataset=data,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    # Also under label smoothing a token is the target of the position before it.
    with torch.no_grad():
        log_p = model.eval()(tokens).logits[:, :-1].log_softmax(-1)
    expected = -log_p.gather(-1, tokens[:, 1:, None]).mean()
    if how == "smoothing":
        expected = 0.9 * expected - 0.1 * log_p.mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)
    saved = load_language_model(tmp_path / "checkpoint-24")
    torch.testing.assert_close(saved(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", ["rotary", "untied", "softmax"])
def test_a_grown_model_is_saved_as_grown(kind, tmp_path):
    model, tokens = build(**KINDS[kind]), torch.randint(61, (2, 9))
    before = model(tokens).logits
    counts = {"num_qkv_param_tokens": 64, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 256}
    init = "duplicate" if kind == "softmax" else "zero_key"
    grow(model.model, **counts, init=init, split=kind == "rotary")
    assert {name: getattr(model.config, name) for name in counts} == counts
    loaded = reload(model, tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert counts.items() <= json.loads((tmp_path / "config.json").read_text()).items()


@pytest.mark.parametrize("kind", ["tokenformer", "learned", "rotary"])
def test_a_folder_says_where_texts_end_and_how_long_they_may_be(kind, tmp_path):
    if kind == "tokenformer":
        model = build(vocab_size=258)
    else:
        model = transformer_lm(258, 40, 32, 1, 2, positions=kind)
    save_language_model(model, tmp_path, byte_tokenizer())
    loaded, tokenizer = load(tmp_path)[0], AutoTokenizer.from_pretrained(tmp_path)
    end = SequenceBiasLogitsProcessor([[[256], 1e4]])
    written = loaded.generate(torch.tensor([[65]]), logits_processor=[end], max_new_tokens=9)
    assert written.tolist() == [[65, 256]]
    assert len(tokenizer("x" * 99, truncation=True)["input_ids"]) == 40
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    texts = tokenizer(["one", "another"], padding=True, return_tensors="pt")
    assert classifier(**texts).logits.shape == (2, 2)


@pytest.mark.parametrize("tie", [True, False])
def test_the_vocabulary_can_be_resized(tie, tmp_path):
    model, tokens = build(tie_embeddings=tie), torch.randint(61, (2, 9))
    before = model(tokens).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.config.vocab_size == model.model.config.vocab_size == 70
    after = reload(model, tmp_path)(tokens).logits
    assert after.shape == (2, 9, 70)
    torch.testing.assert_close(after[..., :61], before)


def test_nested_sizes_and_extracted_models_are_saved(tmp_path):
    model = build(nested=(0.25, 0.5))
    tokens = torch.randint(61, (2, 9))
    loaded = reload(model, tmp_path / "nested")
    assert loaded.config.nested == model.config.nested == (0.25, 0.5)
    assert loaded.model.sizes == (0.25, 0.5, 1.0)
    for size in (0.25, 0.5):
        for each in (model, loaded):
            each.model.set_size(size)
        expected = model(tokens).logits
        assert torch.equal(loaded(tokens).logits, expected)
        small = reload(extract(model, size), tmp_path / f"{size}")
        assert small.config.num_qkv_param_tokens == round(size * 32)
        assert torch.equal(small(tokens).logits, expected)
    assert load(tmp_path / "nested", device_map="meta")[0].sizes == (0.25, 0.5, 1.0)
