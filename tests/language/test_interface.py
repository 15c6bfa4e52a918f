"""What transformers, and what builds on it, expects of a model: inputs, outputs, masks, caches."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    DynamicCache,
    StaticCache,
    Trainer,
)

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow, merge
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    TokenFormerModel,
    load_language_model,
    modeling,
    transformer_lm,
)
from tokenformer_vit.layers import Pattention

SHAPE = {
    "vocab_size": 61,
    "context_length": 40,
    "embed_dim": 32,
    "depth": 2,
    "num_heads": 2,
    "rotary_share": 0.5,
}
PLAIN = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def build(attention="sdpa", **changes):
    config = TokenFormerConfig(**{**SHAPE, **changes}, attn_implementation=attention)
    model = TokenFormerForCausalLM(config)
    with torch.no_grad():  # so that the token at hand is not drowned
        model.get_input_embeddings().weight.mul_(20)
    return model.double().eval()


@pytest.fixture
def tokens():
    return torch.randint(2, 61, (3, 9))


def test_embedded_tokens_serve_as_tokens(tokens):
    model = build()
    embedded = model.get_input_embeddings()(tokens)
    assert torch.equal(model(inputs_embeds=embedded).logits, model(tokens).logits)
    written = model.generate(inputs_embeds=embedded, **PLAIN)
    assert torch.equal(written, model.generate(tokens, **PLAIN)[:, 9:])


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_hidden_states_and_attentions_are_outputs(positions, tokens):
    model = build("eager", positions=positions)
    output = model(tokens, output_hidden_states=True, output_attentions=True)
    assert len(output.hidden_states) == 3
    assert torch.equal(model.lm_head(output.hidden_states[-1]), output.logits)
    block, first = model.model.blocks[0], output.hidden_states[0]
    if positions == "rotary":
        assert torch.equal(first, model.model.embedding(tokens))
    assert len(output.attentions) == 2
    weights = output.attentions[0]
    assert weights.shape == (3, 2, 9, 9)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 2, 9).double())
    assert weights.triu(1).abs().max() == 0
    value = block.attn.project(block.norm1(first))[2]
    mixed = block.attn.proj((weights @ value).transpose(1, 2).reshape(3, 9, 32))
    second = first + mixed
    second = second + block.mlp(block.norm2(second))
    torch.testing.assert_close(output.hidden_states[1], second)
    assert model(tokens).hidden_states is None
    torch.testing.assert_close(output.logits, build_like(model, "sdpa")(tokens).logits)


def build_like(model, attention):
    other = copy.deepcopy(model)
    other.set_attn_implementation(attention)
    return other


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_packed_rows_are_read_apart(attention, positions):
    model = build(attention, positions=positions)
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
    many = torch.randint(61, (1, 60))  # longer than the context, but no text in it is
    places = torch.arange(60)[None] % 20
    logits = model(many, position_ids=places, use_cache=False).logits
    torch.testing.assert_close(logits[:, 40:], model(many[:, 40:]).logits)


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("embedded", [False, True])
def test_a_full_context_ends_in_one_line(cache, positions, embedded, tokens):
    model = build(positions=positions)
    how = {**PLAIN, "max_new_tokens": 40, "cache_implementation": cache}
    prompt = {"inputs_embeds": model.get_input_embeddings()(tokens)} if embedded else {}
    with pytest.raises(InputError, match=r"41 tokens.*context_length is 40"):
        model.generate(**(prompt or {"input_ids": tokens}), **how)
    prompt = {name: each[:, :1] for name, each in prompt.items()} or {"input_ids": tokens[:, :1]}
    assert model.generate(**prompt, **{**how, "max_new_tokens": 39}).shape[1] == 40 - embedded


def test_models_of_one_config_are_saved_with_their_own_sizes(tmp_path):
    config = TokenFormerConfig(**SHAPE)
    grown, other = TokenFormerForCausalLM(config), TokenFormerForCausalLM(config)
    grow(grown, num_ffn_param_tokens=200)
    for model, count in ((other, 128), (grown, 200)):
        model.save_pretrained(tmp_path)
        loaded = TokenFormerForCausalLM.from_pretrained(tmp_path)
        assert loaded.model.blocks[0].mlp.num_param_tokens == count


def test_flash_attention_gets_what_it_reads(tokens, monkeypatch):
    from transformers.integrations import flash_attention

    seen = []

    def kernel(query, key, value, *args, **kwargs):  # (B, N, heads, D), causal
        seen.append(kwargs["is_causal"])
        parts = (each.transpose(1, 2) for each in (query, key, value))
        mixed = torch.nn.functional.scaled_dot_product_attention(*parts, is_causal=True)
        return mixed.transpose(1, 2)

    monkeypatch.setattr(flash_attention, "_flash_attention_forward", kernel)
    model = build()
    expected = model(tokens, use_cache=False).logits
    model.config._attn_implementation = "flash_attention_2"
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected)
    assert seen == [True, True]


@pytest.mark.slow
@torch.no_grad()  # PyTorch's has no gradient on a CPU
def test_flex_attention_computes_the_same(tokens):
    model = build().float()
    expected = model(tokens, use_cache=False).logits
    other = build_like(model, "flex_attention")
    torch.testing.assert_close(other(tokens, use_cache=False).logits, expected)


def test_a_configuration_of_quantisation_is_refused_by_every_way(tmp_path):
    build().save_pretrained(tmp_path)
    again = TokenFormerForCausalLM.from_pretrained(tmp_path, config=str(tmp_path))
    config = again.config
    config.quantization_config = {"quant_type": "int8"}
    with pytest.raises(InputError, match="quantization_config quantises linear layers"):
        TokenFormerForCausalLM.from_pretrained(tmp_path, config=config)
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "torchao"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    with pytest.raises(InputError, match="quantization_config quantises linear layers"):
        TokenFormerForCausalLM.from_pretrained(tmp_path)


@pytest.mark.parametrize("auto", [False, True])
def test_weights_for_another_computation_are_refused(auto, tmp_path):
    build().save_pretrained(tmp_path)
    load = (AutoModelForCausalLM if auto else TokenFormerForCausalLM).from_pretrained
    assert load(tmp_path, theta="gelu_l2").config.theta == "gelu_l2"
    fault = r"theta is 'gelu_l1', but the weights in .* were trained with 'gelu_l2': set theta="
    with pytest.raises(InputError, match=fault):
        load(tmp_path, theta="gelu_l1")
    config = AutoConfig.from_pretrained(tmp_path)
    assert load(tmp_path, config=config).config.theta == "gelu_l2"
    config.theta = "gelu_l1"
    with pytest.raises(InputError, match=fault):
        load(tmp_path, config=config)
    with pytest.raises(InputError, match=r"norm is 'rms', .* trained with 'none': set norm="):
        load(tmp_path, norm="rms")
    with pytest.raises(InputError, match=r"num_heads is 4, .* trained with 2: set num_heads=2"):
        load(tmp_path, num_attention_heads=4)
    assert load(tmp_path, rotary_base=2e4).config.rotary_base == 2e4  # for longer sequences


def test_two_names_of_a_size_must_agree():
    assert TokenFormerConfig(embed_dim=32, hidden_size=32, num_heads=2).embed_dim == 32
    with pytest.raises(InputError, match=r"embed_dim is 64, but hidden_size.* is 32"):
        TokenFormerConfig(embed_dim=64, hidden_size=32)


def test_a_changed_base_changes_the_rotation(tokens):
    model = build()
    before = model(tokens).logits
    model.config.rotary_base = 100.0
    assert not torch.allclose(model(tokens).logits, before)


@pytest.mark.parametrize("padded", [False, True])
def test_a_static_cache_writes_the_same(padded, tokens):
    model, mask = build(), torch.ones_like(tokens)
    if padded:
        mask[0, :4] = 0
    written = [
        model.generate(tokens, attention_mask=mask, cache_implementation=cache, **PLAIN)
        for cache in ("dynamic", "static")
    ]
    assert torch.equal(*written)
    cache = StaticCache(config=model.config, max_cache_len=20)
    parts = [model(tokens[:, :6], cache=cache).logits]
    parts += [model(tokens[:, i : i + 1], cache=cache).logits for i in range(6, 9)]
    torch.testing.assert_close(torch.cat(parts, dim=1), model(tokens).logits)


@pytest.mark.parametrize("depth", [1, 2])
def test_the_first_blocks_draft_what_the_model_writes(depth, tokens):
    model, runs = build(depth=3, num_ffn_param_tokens=[128, 96, 64]), []
    expected = model.generate(tokens[:1], **PLAIN)
    for block in model.model.blocks:
        block.register_forward_hook(lambda block, *_: runs.append(block.attn.layer_idx))
    written = model.generate(tokens[:1], assistant_early_exit=depth, **PLAIN)
    assert torch.equal(written, expected)
    assert model.config.num_hidden_layers == 3
    assert runs.count(0) == runs.count(depth - 1) > runs.count(depth)


def test_a_cache_has_two_names(tokens):
    model = build()
    logits = []
    for name in ("past_key_values", "cache"):
        cache = DynamicCache()
        model(tokens[:, :6], **{name: cache})
        assert cache.get_seq_length() == 6
        logits.append(model(tokens[:, 6:], **{name: cache}).logits)
    assert torch.equal(*logits)


@pytest.mark.slow
def test_compiled_generation_writes_the_same(tokens):
    model = build()
    expected = model.generate(tokens, **PLAIN)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(tokens, cache_implementation="static", **PLAIN), expected)


def test_a_decoding_step_never_waits_for_the_device():
    with torch.device("meta"):  # which cannot answer
        model = TokenFormerForCausalLM(TokenFormerConfig(**SHAPE)).eval()
        row, cache = torch.zeros(2, 9, dtype=torch.long), DynamicCache()
        model(row, cache=cache)
        for length in (10, 11):
            step = model(
                row[:, :1],
                attention_mask=torch.ones(2, length),
                position_ids=row[:, :1],
                cache=cache,
            )
            assert step.logits.shape == (2, 1, 61)


def test_the_mask_of_a_decoding_step_on_a_gpu_hides_padding(tokens):
    model, mask = build(), torch.ones_like(tokens)
    mask[1, :3] = 0
    expected, cache = model(tokens, attention_mask=mask).logits[:, -1], DynamicCache()
    model(tokens[:, :8], attention_mask=mask[:, :8], cache=cache)
    elsewhere = torch.empty(3, 1, 32, device="meta")  # no CPU, as a GPU
    short = model.model._mask(elsewhere, mask, cache, None)
    places = mask.cumsum(dim=1)[:, -1:] - 1
    step = model(tokens[:, 8:], attention_mask=short, position_ids=places, cache=cache)
    torch.testing.assert_close(step.logits[:, 0], expected)


def test_a_mask_of_another_length_than_the_cache_is_left_to_transformers(tokens, monkeypatch):
    model, cache = build(), DynamicCache()
    mask, elsewhere = torch.ones_like(tokens), torch.empty(3, 1, 32, device="meta")
    model(tokens[:, :8], cache=cache)
    assert model.model._mask(elsewhere, mask, cache, None).shape == (3, 1, 1, 9)
    monkeypatch.setattr(modeling, "create_causal_mask", lambda **_: "theirs")
    for length in (1, 8):
        assert model.model._mask(elsewhere, mask[:, :length], cache, None) == "theirs"


@pytest.mark.parametrize("cache", [None, DynamicCache, StaticCache])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_a_mask_may_be_longer_than_the_tokens(cache, positions, tokens):
    """As for the whole length of a static cache; transformers allows padding only with this one."""
    model, mask = build(positions=positions), torch.zeros(3, 40, dtype=torch.long)
    mask[:, :9] = 1
    mask[1, :3] = int(cache is not StaticCache)
    expected = model(tokens, attention_mask=mask[:, :9]).logits
    if cache is None:
        found = model(tokens, attention_mask=mask).logits
    else:
        sizes = {"max_cache_len": 40} if cache is StaticCache else {}
        kept = cache(config=model.config, **sizes)
        halves = (
            model(part, attention_mask=mask, cache=kept).logits
            for part in (tokens[:, :6], tokens[:, 6:])
        )
        found = torch.cat(tuple(halves), dim=1)
    torch.testing.assert_close(found[mask[:, :9] == 1], expected[mask[:, :9] == 1])


def test_a_mask_shorter_than_the_tokens_is_refused(tokens):
    model, cache = build(), DynamicCache()
    with pytest.raises(InputError, match=r"attention_mask is \(3, 5\), but there are 9 tokens"):
        model(tokens, attention_mask=torch.ones(3, 5))
    model(tokens[:, :8], cache=cache)
    with pytest.raises(InputError, match="8 of them in the cache: give a column for each"):
        model(tokens[:, 8:], attention_mask=torch.ones(3, 1), cache=cache)


def test_use_cache_is_a_setting(tokens):
    model = build(use_cache=False)
    assert getattr(model(tokens), modeling.CACHE) is None
    assert getattr(model(tokens, use_cache=True), modeling.CACHE).get_seq_length() == 9
    model = build()
    assert getattr(model(tokens), modeling.CACHE).get_seq_length() == 9
    assert getattr(model(tokens, use_cache=False), modeling.CACHE) is None


@pytest.mark.parametrize("tie", [True, False])
def test_an_empty_model_is_initialised_as_a_new_one(tie):
    arguments = {"learn_tau": True, "tau": 3.3, "init": "released"}
    config = TokenFormerConfig(
        **{**SHAPE, "tie_embeddings": tie, "theta": "softmax", "nested": (0.5,), "embed_dim": 64},
        norm="weight+bias",
        pattention_args={**arguments, "gate": "fixed"},
    )
    with torch.device("meta"):
        model = TokenFormerForCausalLM(config)
    model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point():
            tensor.data.fill_(torch.nan)
    model.init_weights()
    assert (model.lm_head.weight is model.model.embedding.weight) == tie
    new = TokenFormerForCausalLM(copy.deepcopy(config)).state_dict()
    for name, tensor in model.state_dict().items():
        if name.endswith(("param_tokens", "embedding.weight", "lm_head.weight")):
            assert tensor.std().item() == pytest.approx(new[name].std().item(), rel=0.1), name
            assert abs(tensor.mean().item()) < 0.1 * tensor.std().item(), name
        else:
            assert torch.equal(tensor, new[name]), name


def test_a_new_tied_head_draws_nothing(seed):
    torch.manual_seed(seed)
    TokenFormerModel(TokenFormerConfig(**SHAPE))
    expected = torch.rand(1)
    torch.manual_seed(seed)
    TokenFormerForCausalLM(TokenFormerConfig(**SHAPE))
    assert torch.equal(torch.rand(1), expected)


def test_base_models_and_classifiers_open_a_language_model(tokens, tmp_path):
    model = build()
    model.save_pretrained(tmp_path)
    # Weights in a mapped file begin at other addresses, and some CPUs then round otherwise.
    base = copy.deepcopy(AutoModel.from_pretrained(tmp_path))
    features = base(tokens).last_hidden_state
    assert torch.equal(model.lm_head(features), model(tokens).logits)
    classifier = AutoModelForSequenceClassification.from_pretrained(
        tmp_path, num_labels=4, pad_token_id=0
    )
    assert classifier.score.weight.std().item() == pytest.approx(0.02, rel=0.3)
    tokens[0, 6:] = 0  # its last token is the one before padding
    output = classifier(tokens, labels=torch.tensor([0, 3, 2]))
    expected = classifier.score(base(tokens).last_hidden_state[[0, 1, 2], [5, 8, 8]])
    torch.testing.assert_close(output.logits, expected)
    output.loss.backward()
    grow(classifier, num_ffn_param_tokens=160)
    assert classifier.config.num_ffn_param_tokens == classifier.model.shape.num_ffn_param_tokens
    torch.testing.assert_close(classifier(tokens).logits, output.logits)


def test_the_angles_of_rotation_are_made_once_and_outlive_casts(tokens):
    model = build()
    with torch.inference_mode():
        model(tokens)
    turns = model.model._turns
    model(tokens, labels=tokens).loss.backward()
    assert model.model._turns is turns
    model.bfloat16()(tokens)
    assert model.model._turns is turns
    assert turns[0].dtype == torch.float32
    assert "turns" not in "".join(model.state_dict())


@pytest.mark.parametrize("first", [-3, 38, 5000])
@pytest.mark.parametrize("grad", [False, True])
def test_only_distances_count_also_outside_of_the_context(tokens, first, grad):
    model, positions = build(), torch.arange(9)[None]
    with torch.set_grad_enabled(grad):
        expected = model(tokens, position_ids=positions).logits
        moved = model(tokens, position_ids=positions + first).logits
        one = [model(tokens[:, :1], position_ids=positions[:, :1] + at).logits for at in (0, first)]
    torch.testing.assert_close(moved, expected, rtol=1e-3, atol=1e-3)  # angles are float32
    torch.testing.assert_close(*one)
    model.config.rotary_base = 100.0  # it sees the rotation
    assert not torch.allclose(model(tokens).logits, expected, rtol=1e-2, atol=1e-2)


def test_models_of_other_rotations_are_not_merged():
    with pytest.raises(InputError, match=r"rotary_base is 10000.0 .* and 500.0 in model_b"):
        merge(build(), build(rotary_base=500.0))
    assert merge(build(), build()).config.num_ffn_param_tokens == 256


def test_gradient_checkpointing_computes_the_same_gradients(tokens):
    model = build().train()

    def gradients():
        model.zero_grad()
        model(tokens, labels=tokens).loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    runs = []
    model.model.blocks[0].mlp.register_forward_pre_hook(lambda *_: runs.append(1))
    expected = gradients()
    model.gradient_checkpointing_enable()
    torch.testing.assert_close(gradients(), expected, rtol=0, atol=0)
    assert len(runs) == 3  # once, then twice


class OwnTrainer(Trainer):
    """As README.md has it."""

    def get_decay_parameter_names(self, model):
        names = super().get_decay_parameter_names(model)
        return [name for name in names if not name.endswith(("tau", "gate"))]


def test_a_learned_tau_need_not_decay():
    pytest.importorskip("accelerate", reason="Trainer needs accelerate")
    model = build(theta="softmax", pattention_args={"learn_tau": True, "gate": "learned"})
    decayed = set(OwnTrainer.get_decay_parameter_names(OwnTrainer.__new__(OwnTrainer), model))
    for name, layer in model.named_modules():
        if isinstance(layer, Pattention):
            own = {f"{name}.{each}" for each, _ in layer.named_parameters()}
            assert own - decayed == {f"{name}.tau", f"{name}.gate"}


# In another process: without our import, and with the finder of classes that transformers copies.
OPEN = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__, type(model).__name__)
model.save_pretrained(sys.argv[2])
"""


def run_alone(code, *words, folder, **environment):
    environment = {**os.environ, "HF_MODULES_CACHE": str(folder / "modules"), **environment}
    words = [sys.executable, "-c", code, *map(str, words)]
    return subprocess.run(words, capture_output=True, text=True, cwd=folder, env=environment)


@pytest.mark.slow
def test_a_process_without_our_import_opens_a_folder(tmp_path):
    build().save_pretrained(tmp_path / "model")
    root = str(Path(__file__).parents[2])
    done = run_alone(OPEN, tmp_path / "model", tmp_path / "again", folder=tmp_path, PYTHONPATH=root)
    assert done.stdout.split() == ["tokenformer_vit.language.modeling", "TokenFormerForCausalLM"], (
        done.stderr
    )
    for name in ("config.json", "modeling_tokenformer.py"):
        files = [(tmp_path / folder / name).read_text() for folder in ("model", "again")]
        assert files[0] == files[1]
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {path.name for path in (tmp_path / "model").iterdir()}


@pytest.mark.slow
def test_without_the_package_a_folder_says_what_to_install(tmp_path):
    build().save_pretrained(tmp_path / "model")
    absent = "import sys; sys.modules['tokenformer_vit'] = None\n"
    done = run_alone(absent + OPEN, tmp_path / "model", tmp_path / "again", folder=tmp_path)
    last = done.stderr.strip().splitlines()[-1]
    assert "in its clone, run pip install '.[language]'" in last, done.stderr


@pytest.mark.parametrize("kind", ["tokenformer", "gpt2", "unknown"])
def test_code_that_a_configuration_names_never_runs(kind, tmp_path):
    model = transformer_lm(61, 40, 32, 1, 2) if kind == "gpt2" else build()
    model.save_pretrained(tmp_path)
    ran = tmp_path / "ran"
    (tmp_path / "evil.py").write_text(f"open({str(ran)!r}, 'w')")
    config = json.loads((tmp_path / "config.json").read_text())
    classes = ("AutoConfig", "AutoModel", "AutoModelForCausalLM")
    config["auto_map"] = dict.fromkeys(classes, "evil.Evil")
    config["model_type"] = kind
    (tmp_path / "config.json").write_text(json.dumps(config))
    if kind == "unknown":
        with pytest.raises(InputError, match=r"config\.json cannot be used"):
            load_language_model(tmp_path, kinds=None)
    else:
        loaded = load_language_model(tmp_path, kinds=None)
        assert type(loaded) is type(model)
        loaded.save_pretrained(tmp_path / "again")
        if kind == "tokenformer":
            assert "evil" not in (tmp_path / "again/config.json").read_text()
    assert not ran.exists()
