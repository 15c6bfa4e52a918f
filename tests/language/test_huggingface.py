"""The language model under transformers: inputs, masks, caches, texts, training, saving, growth."""

import copy
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSequenceClassification

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import extract, grow
from tokenformer_vit.language import TokenFormerConfig, TokenFormerForCausalLM, transformer_lm
from tokenformer_vit.language.generation import load_language_model, save_language_model
from tokenformer_vit.language.tokenizers import byte_tokenizer
from tokenformer_vit.models import LM_PRESETS, LMConfig, lm_config
from tokenformer_vit.models.sizes import find_layers
from tokenformer_vit.ops import THETAS

ROOT = Path(__file__).parents[2]
SHAPE = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
KINDS = {
    "rotary": {"rotary_share": 0.5},
    "learned": {"positions": "learned", "norm": "rms"},
    "untied": {"rotary_share": 1.0, "tie_embeddings": False},
    "softmax": {"rotary_share": 0.5, "theta": "softmax", "pattention_args": {"learn_tau": True}},
    "linear": {"theta": {"qkv": "linear", "proj": "linear", "ffn": "gelu"}, "norm": "rms+weight"},
}
KINDS["linear"] |= {"pattention_args": {"bias": True}}
SEARCHES = [{}, {"num_beams": 3}]
SEARCHES += [{"do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3}]
STEPS = {"max_steps": 24, "per_device_train_batch_size": 4, "learning_rate": 1e-2, "save_steps": 24}
STEPS |= {"logging_steps": 1, "use_cpu": True, "report_to": [], "disable_tqdm": True}
PLAIN = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}
PARAMETERS = {
    "150m": 151_881_216,
    "450m": 454_166_528,
    "900m": 903_252_480,
    "1.5b": 1_587_219_456,
    "grown_124m": 123_569_664,
    "grown_354m": 354_190_848,
    "released_354m": 353_503_232,
    "released_757m": 756_156_416,
}
PARAMETERS |= {"tiny": 7_487_744, "grown_757m": 753_796_608, "grown_1.4b": 1_309_705_728}


def build(attention="sdpa", **changes):
    config = {**SHAPE, **KINDS["rotary"], **changes, "attn_implementation": attention}
    model = TokenFormerForCausalLM(TokenFormerConfig(**config))
    model.model.embedding.weight.data.mul_(20)  # so that the token at hand is not drowned
    return model.eval()


@pytest.fixture
def tokens():
    return torch.randint(2, 61, (3, 9))


def reload(model, folder, **kwargs):
    model.save_pretrained(folder)
    loaded, found = load(folder, **kwargs)
    assert not any(found.values()), found
    return loaded


def load(folder, **kwargs) -> Any:
    """Return a model, and transformers' report about its weights."""
    return AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True, **kwargs)


@pytest.mark.parametrize("preset", LM_PRESETS)
def test_presets_have_the_published_sizes(preset):
    with torch.device("meta"):
        model = TokenFormerForCausalLM(TokenFormerConfig(**vars(lm_config(preset))))
    assert model.num_parameters() == PARAMETERS[preset]


@pytest.mark.parametrize("kind", ["rotary", "learned", "untied"])
@pytest.mark.parametrize("theta", THETAS)
def test_with_a_cache_it_computes_the_same(kind, theta):
    """Also: no token sees a later one, which the cache does not have yet."""
    model, tokens = build(**KINDS[kind], theta=theta).double(), torch.randint(61, (3, 17))
    expected, cache = model(tokens).logits, transformers.DynamicCache()
    parts = [model(tokens[:, :5], cache=cache)]
    parts += [model(tokens[:, i : i + 1], cache=cache) for i in range(5, 11)]
    parts.append(model(tokens[:, 11:], cache=cache))
    assert cache.get_seq_length() == 17
    torch.testing.assert_close(torch.cat([part.logits for part in parts], dim=1), expected)


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_padding_on_either_side_changes_nothing(kind):
    model, tokens = build(**kind).double(), torch.randint(61, (1, 9))
    expected = model(tokens).logits
    filling, other = torch.randint(61, (1, 5)), torch.randint(61, (1, 14))
    for parts, own in (((filling, tokens), slice(5, 14)), ((tokens, filling), slice(0, 9))):
        mask = torch.ones(2, 14)
        mask[0] = 0
        mask[0, own] = 1
        logits = model(torch.cat((torch.cat(parts, dim=1), other)), attention_mask=mask).logits
        torch.testing.assert_close(logits[:1, own], expected)
        torch.testing.assert_close(logits[1:], model(other).logits)
        assert logits.isfinite().all()


def test_what_does_not_fit_is_said():
    model, cache = build(), transformers.DynamicCache()
    model(torch.zeros(1, 40, dtype=torch.long), cache=cache)
    with pytest.raises(InputError, match=r"has 41 tokens, but context_length is 40: shorten"):
        model(torch.zeros(1, 1, dtype=torch.long), cache=cache)
    with pytest.raises(InputError, match="rotates 1 dimensions of a head: give"):
        LMConfig(embed_dim=16, num_heads=4)
    with pytest.raises(InputError, match=r"preset must be one of 150m, .*, but got '124m'"):
        lm_config("124m")


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_a_saved_model_is_the_same_model(kind, tokens, tmp_path):
    model = build(**kind)
    for layer in (model.model.blocks[0].mlp, model.model.blocks[1].attn.key):
        layer.tau.data.mul_(1.7)  # as after growth: not what the number of pairs says
    loaded = reload(model, tmp_path)
    assert type(loaded) is TokenFormerForCausalLM
    assert not loaded.training
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)
    assert asdict(loaded.config) == asdict(AutoConfig.from_pretrained(tmp_path))
    stems = {"config", "generation_config", "model", "modeling_tokenformer"}
    assert {path.stem for path in tmp_path.iterdir()} == stems


def test_outputs_are_a_tuple_or_of_chosen_tokens(tokens):
    model = build()
    logits = model(tokens).logits
    torch.testing.assert_close(model(tokens, return_dict=False)[0], logits)
    for kept, places in ((torch.tensor([0, 4]), [0, 4]), (2, [7, 8])):
        torch.testing.assert_close(model(tokens, logits_to_keep=kept).logits, logits[:, places])


def test_the_configuration_answers_to_the_names_of_transformers():
    theirs = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4}
    theirs |= {"max_position_embeddings": 99, "tie_word_embeddings": False}
    config = TokenFormerConfig(**theirs)
    ours = LMConfig(embed_dim=64, depth=3, num_heads=4, context_length=99, tie_embeddings=False)
    assert asdict(config).items() >= asdict(ours).items()
    # Other libraries, such as peft, look for these names in the dict.
    assert config.to_dict().items() >= theirs.items()
    assert TokenFormerConfig(**config.to_dict()).to_dict() == config.to_dict()
    with pytest.raises(InputError, match=r"hidden_size is 32, but .* is 64: give one"):
        TokenFormerConfig(embed_dim=64, hidden_size=32)


def test_unknown_names_are_refused(tmp_path):
    for name, close in {"rope_theta": "theta", "sliding_window": "none", "depht": "depth"}.items():
        with pytest.raises(InputError, match=rf"no {name}: correct it \(close names: .*{close}"):
            TokenFormerConfig(**{name: 2})
    with pytest.raises(InputError, match="no rope_parameters: "):
        TokenFormerConfig(rope_scaling={"rope_type": "linear", "factor": 2.0})
    theirs = {"num_labels": 3, "torch_dtype": "float32", "attn_implementation": "eager"}
    config = TokenFormerConfig(**theirs, name_or_path="x", output_attentions=True, temperature=0.5)
    config.note = "of another library"
    config.save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match="has no note"):
        assert AutoConfig.from_pretrained(tmp_path).note == config.note


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_tau_stays_float32(dtype, tmp_path):
    tau = build().model.blocks[0].mlp.tau
    assert tau != tau.to(dtype)
    low = reload(build(), tmp_path, dtype=dtype)
    for each in (low, build().to(dtype), reload(low, tmp_path / "low")):
        assert each.dtype == dtype
        assert torch.equal(each.model.blocks[0].mlp.tau, tau)


@pytest.mark.parametrize("kind", [{"nested": (0.5,)}, KINDS["linear"]])
def test_what_a_checkpoint_lacks_is_drawn_and_the_rest_is_not(kind, tmp_path):
    model, absent = build(**kind), "model.blocks.1.mlp.key_param_tokens"
    norm, file = "model.blocks.1.norm1.weight", tmp_path / "model.safetensors"
    for each in (*model.parameters(), *(layer.tau for layer in find_layers(model).values())):
        each.data += 0.1
    model.save_pretrained(tmp_path)
    tensors = load_file(file)
    lacking = {absent, norm} & tensors.keys()
    tensors = {name: each for name, each in tensors.items() if name not in lacking}
    save_file(tensors, file, {"format": "pt"})
    loaded, found = load(tmp_path)
    assert set(found["missing_keys"]) == lacking
    own = loaded.state_dict()
    torch.testing.assert_close({name: own[name] for name in tensors}, tensors, rtol=0, atol=0)
    assert own[absent].std().item() == pytest.approx(32**-0.5, rel=0.1)
    assert (own.get(norm, torch.ones(())) == 1).all()
    with pytest.raises(InputError, match=rf"{absent} is missing"):
        load_language_model(tmp_path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "pytorch_model.bin"])
def test_a_cut_file_is_told(name, tmp_path):
    build().save_pretrained(tmp_path)
    if name == "pytorch_model.bin":
        torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / name)
        (tmp_path / "model.safetensors").unlink()
    (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-9])
    with pytest.raises(InputError, match=r"model in .* cannot be read .*: copy or export it again"):
        load_language_model(tmp_path)


@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("kind", ["rotary", "learned"])
def test_with_and_without_a_cache_it_writes_the_same(kind, search, seed, tokens):
    model, mask = build(**KINDS[kind]).double(), torch.ones_like(tokens)
    mask[0, :4] = mask[2, :1] = 0
    for inputs in ({"inputs": tokens[:1, :7]}, {"inputs": tokens, "attention_mask": mask}):
        written = []
        for how in ({"use_cache": True}, {"use_cache": False}, {"cache_implementation": "static"}):
            torch.manual_seed(seed)
            written.append(model.generate(**inputs, **{**PLAIN, **search}, **how))
        assert written[0].equal(written[1])
        assert written[0].equal(written[2])
        assert written[0].shape[1] == inputs["inputs"].shape[1] + 12


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_trainer_trains_it(smoothing, tmp_path):
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model = TokenFormerForCausalLM(TokenFormerConfig(**SHAPE, rotary_share=0.5))
    tokens = torch.randint(61, (8, 16))
    data = [{"input_ids": row, "labels": row, "attention_mask": row > -1} for row in tokens]
    how = {"gradient_checkpointing": not smoothing, "label_smoothing_factor": smoothing}
    arguments = transformers.TrainingArguments(str(tmp_path), **STEPS, **how)
    trainer = transformers.Trainer(model, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < 0.9 * losses[0]
    # Also under label smoothing a token is the target of the position before it.
    with torch.no_grad():
        log_p = model.eval()(tokens).logits[:, :-1].log_softmax(-1)
    expected = -log_p.gather(-1, tokens[:, 1:, None]).mean()
    expected = (1 - smoothing) * expected - smoothing * log_p.mean()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected.item(), rel=1e-4)
    saved = load_language_model(tmp_path / "checkpoint-24")
    torch.testing.assert_close(saved(tokens).logits, model(tokens).logits)


@pytest.mark.parametrize("kind", ["rotary", "untied", "softmax"])
def test_a_grown_model_is_saved_as_grown(kind, tokens, tmp_path):
    model = build(**KINDS[kind])
    before = model(tokens).logits
    counts = {"num_qkv_param_tokens": 64, "num_proj_param_tokens": 32, "num_ffn_param_tokens": 256}
    init = "duplicate" if kind == "softmax" else "zero_key"
    grow(model.model, **counts, init=init, split=kind == "rotary")
    loaded = reload(model, tmp_path)
    for each in (model, loaded):
        assert {name: getattr(each.config, name) for name in counts} == counts
    torch.testing.assert_close(loaded(tokens).logits, before, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(loaded(tokens).logits, model(tokens).logits, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["tokenformer", "learned", "rotary"])
def test_a_folder_says_where_texts_end_and_how_long_they_may_be(kind, tmp_path):
    ours = kind == "tokenformer"
    model = build(vocab_size=258) if ours else transformer_lm(258, 40, 32, 1, 2, positions=kind)
    save_language_model(model, tmp_path, byte_tokenizer())
    loaded, tokenizer = load(tmp_path)[0], transformers.AutoTokenizer.from_pretrained(tmp_path)
    end = transformers.SequenceBiasLogitsProcessor([[[256], 1e4]])
    written = loaded.generate(torch.tensor([[65]]), logits_processor=[end], max_new_tokens=9)
    assert written.tolist() == [[65, 256]]
    assert len(tokenizer("x" * 99, truncation=True)["input_ids"]) == 40
    classifier = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    texts = tokenizer(["one", "another"], padding=True, return_tensors="pt")
    assert classifier(**texts).logits.shape == (2, 2)
    if ours:  # a pipeline with its defaults ends with the context
        write = transformers.pipeline("text-generation", model=str(tmp_path), device="cpu")
        assert write("Hello", do_sample=False)[0]["generated_text"].startswith("Hello")


def test_nested_sizes_and_extracted_models_are_saved(tokens, tmp_path):
    model = build(nested=(0.25, 0.5))
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
    config = grow(build(), num_ffn_param_tokens=256, nested=True).config
    assert (config.nested, config.nested_kinds) == ((0.5,), ("ffn",))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_packed_rows_are_read_apart(attention, positions):
    model = build(attention, positions=positions, context_length=8).double()  # for each text
    texts = [torch.randint(61, (1, length)) for length in (4, 3, 6)]
    expected = torch.cat([model(text).logits for text in texts], dim=1)
    row = torch.cat(texts, dim=1)
    places = torch.cat([torch.arange(text.shape[1]) for text in texts])[None]
    for cached in (False, True, None):
        packed = model(row, position_ids=places, use_cache=cached).logits
        torch.testing.assert_close(packed, expected)
    allowed = torch.block_diag(*(torch.ones(n, n).tril() for n in (4, 3, 6))).bool()[None, None]
    added = torch.zeros(allowed.shape).double().masked_fill(~allowed, -torch.inf)
    for mask in (allowed, added):
        logits = model(row, attention_mask=mask, position_ids=places).logits
        torch.testing.assert_close(logits, expected)


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_text_ends_with_the_context(how, positions, tokens):
    model, how = build(positions=positions).double(), {**PLAIN, "max_new_tokens": 99, **how}
    embed, whole = model.get_input_embeddings(), model.generate(tokens, **how)
    assert whole.shape == (3, 40)
    assert torch.equal(whole[:, 9:], model.generate(inputs_embeds=embed(tokens), **how))
    for full in ({"inputs": whole}, {"inputs_embeds": embed(whole)}):
        with pytest.raises(InputError, match=r"prompt has 40 tokens.*length is 40: shorten"):
            model.generate(**full, **how)


def test_a_paged_cache_writes_the_same():
    model, prompts = build(), [torch.randint(2, 61, (length,)).tolist() for length in (4, 9, 6)]
    how = transformers.GenerationConfig(**PLAIN, eos_token_id=-1)
    small = transformers.ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = model.generate_batch(prompts, how, small, progress_bar=False)
    for prompt, output in zip(prompts, found.values(), strict=True):
        alone = model.generate(torch.tensor([prompt]), generation_config=how)
        assert output.generated_tokens == alone[0, len(prompt) :].tolist()


@pytest.mark.parametrize("auto", [False, True])
def test_weights_for_another_computation_are_refused(auto, tmp_path):
    build().double().save_pretrained(tmp_path)
    load = (AutoModelForCausalLM if auto else TokenFormerForCausalLM).from_pretrained
    config = AutoConfig.from_pretrained(tmp_path)
    for how in ({"theta": "gelu_l2"}, {"config": config}):
        assert load(tmp_path, **how).config.theta == "gelu_l2"
    config.theta = "gelu_l1"
    fault = r"theta is 'gelu_l1', but the weights in .* were trained with 'gelu_l2': set theta="
    for how in ({"theta": "gelu_l1"}, {"config": config}):
        with pytest.raises(InputError, match=fault):
            load(tmp_path, **how)
    with pytest.raises(InputError, match=r"num_heads is 4, .* trained with 2: set num_heads=2"):
        load(tmp_path, num_attention_heads=4)
    assert load(tmp_path, rotary_base=2e4).config.rotary_base == 2e4  # for longer sequences
    for eight in (transformers.QuantoConfig(), transformers.BitsAndBytesConfig(load_in_8bit=True)):
        with pytest.raises(InputError, match=r"quantization_config .*see examples/quantize\.py"):
            load(tmp_path, quantization_config=eight)


def test_the_first_blocks_draft_what_the_model_writes(tokens):
    model, runs = build(depth=3, num_ffn_param_tokens=[128, 96, 64]).double(), []
    expected = model.generate(tokens[:1], **PLAIN)
    for block in model.model.blocks:
        block.register_forward_hook(lambda block, *_: runs.append(block.attn.layer_idx))
    assert torch.equal(model.generate(tokens[:1], assistant_early_exit=2, **PLAIN), expected)
    assert runs.count(0) == runs.count(1) > runs.count(2)


@pytest.mark.slow
@torch.no_grad()  # flex_attention has no gradient on a CPU
def test_other_ways_to_run_it_write_the_same(tokens):
    model = build().double()
    expected = model.generate(tokens, **PLAIN)
    compiled = copy.deepcopy(model)
    compiled.forward = torch.compile(compiled.forward, fullgraph=True, backend="aot_eager")
    assert compiled.generate(tokens, cache_implementation="static", **PLAIN).equal(expected)
    model.float().set_attn_implementation("flex_attention")
    logits = model(tokens, use_cache=False).logits.double()
    torch.testing.assert_close(logits, compiled(tokens).logits, rtol=1e-4, atol=1e-4)


def test_base_models_and_classifiers_open_a_language_model(tokens, tmp_path):
    model = build().double()
    model.save_pretrained(tmp_path)
    # Weights in a mapped file begin at other addresses, and some CPUs then round otherwise.
    base = copy.deepcopy(transformers.AutoModel.from_pretrained(tmp_path))
    features = base(tokens).last_hidden_state
    assert torch.equal(model.lm_head(features), model(tokens).logits)
    load = AutoModelForSequenceClassification.from_pretrained
    classifier = load(tmp_path, num_labels=4, pad_token_id=0)
    tokens[0, 6:] = 0  # its last token is the one before padding
    output = classifier(tokens, labels=torch.tensor([0, 3, 2]))
    expected = classifier.score(base(tokens).last_hidden_state[[0, 1, 2], [5, 8, 8]])
    torch.testing.assert_close(output.logits, expected)
    output.loss.backward()
    grow(classifier.model.blocks, num_ffn_param_tokens=160)  # the configuration is not told
    classifier.save_pretrained(tmp_path)
    loaded = load(tmp_path)
    torch.testing.assert_close(loaded(tokens).logits, output.logits)
    assert loaded.config.num_ffn_param_tokens == classifier.config.num_ffn_param_tokens == 160
    loaded.set_size(0.5)
    assert not torch.allclose(loaded(tokens).logits, output.logits)


# In another process: without our import, and with the finder of classes that transformers copies.
OPEN = """
import sys, transformers
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__, type(model).__name__)
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_a_process_without_our_import_opens_a_folder(tmp_path):
    build().double().save_pretrained(tmp_path / "model")
    places = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)}
    folders = (tmp_path / "model", tmp_path / "again")
    words = [sys.executable, "-c", OPEN, *map(str, folders)]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **places})
    assert "tokenformer_vit.language.modeling TokenFormerForCausalLM" in done.stdout, done.stderr
    model, again = ({path.name: path.read_bytes() for path in each.iterdir()} for each in folders)
    assert model == again


def test_code_that_a_configuration_names_never_runs(tmp_path):
    build().double().save_pretrained(tmp_path)
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    config["auto_map"] = dict.fromkeys(("AutoConfig", "AutoModelForCausalLM"), "evil.Evil")
    (tmp_path / "config.json").write_text(json.dumps(config))
    load_language_model(tmp_path).save_pretrained(tmp_path / "again")
    assert "evil" not in (tmp_path / "again/config.json").read_text()
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "unknown"}))
    with pytest.raises(ValueError, match="trust_remote_code"):
        load_language_model(tmp_path)
    assert not (tmp_path / "ran").exists()
