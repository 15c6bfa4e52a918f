"""The language model under transformers: saved, loaded, generating, trained, grown."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
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
    BloomConfig,
    SequenceBiasLogitsProcessor,
    Trainer,
    TrainingArguments,
    pipeline,
)

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, grow
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerForSequenceClassification,
    TokenFormerModel,
    byte_tokenizer,
    load_language_model,
    load_tokenizer,
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
    with torch.no_grad():  # so that the token at hand is not drowned
        model.model.embedding.weight.mul_(20)
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
    assert loaded.model.shape == model.model.shape
    assert AutoConfig.from_pretrained(tmp_path).lm_config() == model.model.shape
    assert {path.name for path in tmp_path.iterdir()} == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "modeling_tokenformer.py",
    }


def test_a_configuration_is_uploaded_with_the_file_that_finds_its_classes(tmp_path, monkeypatch):
    kept, found = TokenFormerConfig._get_files_timestamps, []
    api = SimpleNamespace(create_repo=lambda name, **_: SimpleNamespace(repo_id=name))
    module = "transformers.configuration_utils"  # versions differ in what they call
    monkeypatch.setattr(f"{module}.hf_api", lambda: api, raising=False)
    monkeypatch.setattr(f"{module}.create_repo", api.create_repo, raising=False)

    def upload(self, folder, repository, before, **_):
        found.extend(set(kept(self, folder)) - set(before))

    monkeypatch.setattr(TokenFormerConfig, "_upload_modified_files", upload)
    TokenFormerConfig(**SHAPE).save_pretrained(str(tmp_path), push_to_hub=True)
    assert set(found) == {"config.json", "modeling_tokenformer.py"}


def test_it_is_the_model_it_wraps(seed):
    plain = TokenFormerLM(LMConfig(**SHAPE, rotary_share=0.5)).eval()
    torch.manual_seed(seed)
    model = TokenFormerForCausalLM(TokenFormerConfig(**SHAPE, rotary_share=0.5)).eval()
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
    assert config.lm_config() == LMConfig(
        embed_dim=64, depth=3, num_heads=4, context_length=99, tie_embeddings=False
    )
    assert (config.hidden_size, config.num_hidden_layers) == (64, 3)
    assert config != TokenFormerConfig(hidden_size=64, num_heads=4)
    assert TokenFormerConfig(**config.to_dict()).lm_config() == config.lm_config()
    assert config == copy.deepcopy(config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tau_stays_float32(dtype, tmp_path):
    model = build()
    tau = model.model.blocks[0].mlp.tau.clone()
    assert tau != tau.to(dtype)
    low = reload(model, tmp_path, dtype=dtype)
    for each in (low, build().to(dtype)):
        assert each.dtype == dtype
        torch.testing.assert_close(each.model.blocks[0].mlp.tau, tau, rtol=0, atol=0)
    again = reload(low, tmp_path / "low")
    assert again.dtype == dtype
    torch.testing.assert_close(again.model.blocks[0].mlp.tau, tau, rtol=0, atol=0)


@pytest.mark.parametrize("nested", [(), (0.5,)], ids=["plain", "nested"])
def test_what_a_checkpoint_lacks_is_drawn_and_the_rest_is_not(nested, tmp_path):
    model = build(nested=nested)
    for layer in find_layers(model).values():
        for tau in (layer.tau, layer.nested_tau) if nested else (layer.tau,):
            tau.mul_(1.7)
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    absent = "model.blocks.1.mlp.key_param_tokens"
    save_file(
        {name: t for name, t in tensors.items() if name != absent},
        tmp_path / "model.safetensors",
        {"format": "pt"},
    )
    loaded, found = load(tmp_path)
    assert set(found["missing_keys"]) == {absent}
    own = loaded.state_dict()
    for name, tensor in tensors.items():
        if name != absent:
            torch.testing.assert_close(own[name], tensor, rtol=0, atol=0)
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


@torch.no_grad()
def test_padded_prompts_are_continued_as_if_alone():
    model = build().double()
    prompts = [torch.randint(2, 61, (length,)) for length in (5, 9, 8)]
    tokens, mask = torch.zeros(2, 3, 9, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        tokens[row, -len(prompt) :] = prompt
        mask[row, -len(prompt) :] = 1
    together = model.generate(
        tokens, attention_mask=mask, do_sample=False, max_new_tokens=10, pad_token_id=0
    )
    for row, prompt in enumerate(prompts):
        by_hand = prompt[None]
        for _ in range(10):
            likeliest = model(by_hand).logits[:, -1:].argmax(dim=-1)
            by_hand = torch.cat((by_hand, likeliest), dim=1)
        assert torch.equal(together[row, 9:], by_hand[0, len(prompt) :])


def test_the_loss_is_that_of_the_next_token():
    model, tokens = build(), torch.randint(61, (2, 9))
    labels = tokens.clone()
    labels[0, :4] = -100
    output = model(tokens, attention_mask=torch.ones(2, 9), labels=labels)
    logits = output.logits.log_softmax(dim=-1)
    terms = [
        -logits[row, at - 1, tokens[row, at]]
        for row in range(2)
        for at in range(1, 9)
        if row or at >= 4
    ]
    torch.testing.assert_close(output.loss, torch.stack(terms).mean())


@pytest.mark.parametrize(
    "again", [False, pytest.param(True, marks=pytest.mark.slow)], ids=["plain", "checkpointing"]
)
def test_the_trainer_trains_it(again, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model = TokenFormerForCausalLM(TokenFormerConfig(**SHAPE, rotary_share=0.5))
    tokens = torch.randint(61, (8, 16))
    # Nothing predicts the first token; early releases of transformers 5 count it nevertheless.
    labels = tokens.index_fill(1, torch.tensor(0), -100)
    data = [
        {"input_ids": row, "labels": wanted, "attention_mask": row > -1}
        for row, wanted in zip(tokens, labels, strict=True)
    ]
    trainer = Trainer(
        model,
        TrainingArguments(
            str(tmp_path),
            max_steps=24,
            per_device_train_batch_size=4,
            learning_rate=1e-2,
            gradient_checkpointing=again,
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
    assert trainer.evaluate()["eval_loss"] == pytest.approx(
        model(tokens, labels=labels).loss.item(), rel=1e-4
    )
    saved = load_language_model(tmp_path / "checkpoint-24")
    torch.testing.assert_close(saved(tokens).logits, model.eval()(tokens).logits)


@pytest.mark.parametrize("kind", ["rotary", "untied", "softmax"])
def test_a_grown_model_is_saved_as_grown(kind, tmp_path):
    model, tokens = build(**KINDS[kind]), torch.randint(61, (2, 9))
    before = model(tokens).logits
    grow(model.model, num_qkv_param_tokens=48, num_ffn_param_tokens=160)
    counts = {"num_qkv_param_tokens": 48, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 160}
    assert {name: getattr(model.config, name) for name in counts} == counts
    loaded = reload(model, tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert counts.items() <= json.loads((tmp_path / "config.json").read_text()).items()


def test_numbers_of_pairs_by_block_are_saved(tmp_path):
    tokens = torch.randint(61, (2, 9))
    model = build(num_qkv_param_tokens=(20, 12), num_ffn_param_tokens=[64, 64])
    loaded = reload(model, tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    counts = {
        "num_qkv_param_tokens": [20, 12],
        "num_proj_param_tokens": 32,
        "num_ffn_param_tokens": 64,
    }
    assert counts.items() <= json.loads((tmp_path / "config.json").read_text()).items()
    grow(loaded, num_qkv_param_tokens=[20, 16])
    assert loaded.config.num_qkv_param_tokens == [20, 16]
    with pytest.raises(InputError, match=r"qkv_param_tokens has 3 numbers for 2 blocks"):
        build(num_qkv_param_tokens=[8, 8, 8])
    with pytest.raises(InputError, match="num_qkv_param_tokens"):
        build(num_qkv_param_tokens=[8, 0])


@pytest.mark.parametrize("kind", ["tokenformer", "learned", "rotary"])
def test_the_code_of_the_model_card_runs(kind, tmp_path, monkeypatch, capsys):
    if kind == "tokenformer":
        model = build(vocab_size=257)
    else:
        model = transformer_lm(257, 40, 32, 1, 2, positions=kind)
    save_language_model(model, tmp_path / "FOLDER", byte_tokenizer())
    card = (tmp_path / "FOLDER" / "README.md").read_text()
    assert f"Parameters: {model.num_parameters():,}" in card
    assert ("Key-value pairs: q, k, v 32, output 32, FFN 128" in card) == (kind == "tokenformer")
    monkeypatch.chdir(tmp_path)
    exec(re.search(r"```python\n(.*?)```", card, re.DOTALL)[1])
    assert capsys.readouterr().out.startswith("Once upon a time")


@pytest.mark.parametrize("kind", ["tokenformer", "learned", "rotary"])
def test_a_folder_says_where_texts_end_and_how_long_they_may_be(kind, tmp_path):
    if kind == "tokenformer":
        model = build(vocab_size=257)
    else:
        model = transformer_lm(257, 40, 32, 1, 2, positions=kind)
    tokenizer = byte_tokenizer()
    own = tokenizer.model_max_length
    save_language_model(model, tmp_path, tokenizer)
    assert model.config.eos_token_id is model.generation_config.eos_token_id is None
    assert tokenizer.model_max_length == own

    loaded, tokenizer = load(tmp_path)[0], AutoTokenizer.from_pretrained(tmp_path)
    end = SequenceBiasLogitsProcessor([[[256], 1e4]])
    written = loaded.generate(torch.tensor([[65]]), logits_processor=[end], max_new_tokens=9)
    assert written.tolist() == [[65, 256]]
    assert len(tokenizer("x" * 99, truncation=True)["input_ids"]) == 40
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    texts = tokenizer(["one", "another"], padding=True, return_tensors="pt")
    assert classifier(**texts).logits.shape == (2, 2)

    tokenizer.model_max_length = 7  # of another model
    loaded.config.eos_token_id = loaded.generation_config.eos_token_id = 10
    save_language_model(loaded, tmp_path, tokenizer)
    again = load(tmp_path)[0]
    assert again.config.eos_token_id == again.generation_config.eos_token_id == 10
    assert AutoTokenizer.from_pretrained(tmp_path).model_max_length == 40


def test_a_model_without_a_limit_is_saved_with_its_tokenizer(tmp_path):
    config = BloomConfig(vocab_size=257, hidden_size=32, n_layer=1, n_head=2)
    tokenizer = byte_tokenizer()
    save_language_model(AutoModelForCausalLM.from_config(config), tmp_path, tokenizer)
    longest = AutoTokenizer.from_pretrained(tmp_path).model_max_length
    assert longest == tokenizer.model_max_length


@pytest.mark.parametrize("kind", [TokenFormerForSequenceClassification, TokenFormerModel])
def test_a_new_model_that_writes_no_text_is_saved_with_its_tokenizer(kind, tmp_path):
    model, tokens = kind(build(vocab_size=257).config).eval(), torch.randint(257, (1, 9))
    save_language_model(model, tmp_path, byte_tokenizer())
    loaded = kind.from_pretrained(tmp_path)
    assert torch.equal(loaded(tokens)[0], model(tokens)[0])
    assert loaded.config.pad_token_id == byte_tokenizer().pad_token_id
    assert not (tmp_path / "README.md").exists()  # the card is for models that write text


def test_a_full_disk_is_said_of_the_folder_and_leaves_what_was_there(tmp_path, in_another_process):
    model, folder = build(), tmp_path / "run"
    save_language_model(model, folder)
    before = {file.name: file.read_bytes() for file in folder.iterdir()}

    def save():
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (5000, 5000))
        save_language_model(model, folder)

    error = in_another_process(save).err
    assert re.fullmatch(rf"OSError: .*File too large.*: '{folder}'", error), error
    assert before == {file.name: file.read_bytes() for file in folder.iterdir()}
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_new_pairs_in_parameters_of_their_own_are_joined_when_saved(tmp_path):
    model, tokens = build(), torch.randint(61, (2, 9))
    grow(model, num_ffn_param_tokens=160, freeze="old")
    loaded = reload(model, tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("tie", [True, False])
def test_the_vocabulary_can_be_resized(tie, tmp_path):
    model, tokens = build(tie_embeddings=tie), torch.randint(61, (2, 9))
    before = model(tokens).logits
    model.resize_token_embeddings(70, mean_resizing=False)
    assert model.config.vocab_size == model.model.config.vocab_size == 70
    after = reload(model, tmp_path)(tokens).logits
    assert after.shape == (2, 9, 70)
    torch.testing.assert_close(after[..., :61], before)


def test_what_does_not_fit_is_refused():
    model, tokens = build(), torch.randint(61, (2, 9))
    with pytest.raises(InputError, match="either input_ids or inputs_embeds"):
        model(tokens, inputs_embeds=model.get_input_embeddings()(tokens))
    with pytest.raises(InputError, match="context_length is 40"):
        model.generate(tokens, max_new_tokens=40, do_sample=False)
    with pytest.raises(InputError, match="one of rotary, learned, but got 'alibi'"):
        TokenFormerConfig(positions="alibi")


@pytest.mark.slow
def test_language_users_need_no_openmmlab():
    heavy = ("matplotlib", "mmcv", "mmengine", "mmpretrain")
    run = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys, tokenformer_vit.language;"
            f"print([name for name in {heavy} if name in sys.modules])",
        ],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert run.stdout.strip() == "[]", run.stderr


def test_the_published_tokenizers_serve(shared_data, tmp_path):
    sentence = "Parameter tokens, não só input tokens:\n  grow!"
    for path, size in (("gpt_neox_20b/tokenizer.json", 50_277), ("gpt2", 50_257)):
        source = shared_data(f"tokenizers/{path}")
        tokenizer = load_tokenizer(source, size)
        numbers = tokenizer(sentence)["input_ids"]
        assert 5 < len(numbers) < 25
        assert tokenizer.decode(numbers) == sentence
        assert tokenizer.eos_token == tokenizer.pad_token == "<|endoftext|>"
        with pytest.raises(
            InputError, match=rf"has {size} entries.* vocab_size is {size - 1}: give"
        ):
            load_tokenizer(source, size - 1)

        folder = tmp_path / str(size)
        build(vocab_size=size).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        write = pipeline("text-generation", model=str(folder), device="cpu")
        text = write("Hello", max_new_tokens=4, do_sample=False)[0]["generated_text"]
        assert text.startswith("Hello")
        assert load_tokenizer(folder, size)(sentence)["input_ids"] == numbers


def test_nested_sizes_and_extracted_models_are_saved(tmp_path):
    model = build(nested=(0.25, 0.5))
    tokens = torch.randint(61, (2, 9))
    loaded = reload(model, tmp_path / "nested")
    assert loaded.config.lm_config() == model.config.lm_config()
    assert loaded.model.sizes == (0.25, 0.5, 1.0)
    for size in (0.25, 0.4):
        for each in (model, loaded):
            each.model.set_size(size)
        expected = model(tokens).logits
        assert torch.equal(loaded(tokens).logits, expected)
        small = reload(extract(model, size), tmp_path / f"{size}")
        assert small.config.num_qkv_param_tokens == round(size * 32)
        assert torch.equal(small(tokens).logits, expected)
    assert load(tmp_path / "nested", device_map="meta")[0].sizes == (0.25, 0.5, 1.0)
    config = json.loads((tmp_path / "nested/config.json").read_text())
    (tmp_path / "nested/config.json").write_text(json.dumps({**config, "nested": [0.25, 0.75]}))
    with pytest.raises(InputError, match=r"\[8, 16\] in the checkpoint and \[8, 24\]"):
        load(tmp_path / "nested")
    for nested in ("half", [0.5, 1.5], [{"ffn": "all"}]):
        with pytest.raises(InputError, match="nested"):
            TokenFormerConfig(**SHAPE, **KINDS["rotary"], nested=nested)
