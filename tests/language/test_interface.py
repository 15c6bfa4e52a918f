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
    ContinuousBatchingConfig,
    GenerationConfig,
    TextIteratorStreamer,
    pipeline,
)

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    byte_tokenizer,
    load_language_model,
    save_language_model,
)

SHAPE = {"vocab_size": 61, "context_length": 40, "embed_dim": 32, "depth": 2, "num_heads": 2}
ROOT = Path(__file__).parents[2]
PLAIN = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0}


def build(attention="sdpa", **changes):
    config = TokenFormerConfig(
        **{**SHAPE, **changes}, rotary_share=0.5, attn_implementation=attention
    )
    model = TokenFormerForCausalLM(config)
    model.model.embedding.weight.data.mul_(20)  # so that the token at hand is not drowned
    return model.double().eval()


@pytest.fixture
def tokens():
    return torch.randint(2, 61, (3, 9))


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


@pytest.mark.parametrize("how", [{}, {"cache_implementation": "static"}, {"num_beams": 2}])
@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("embedded", [False, True])
def test_a_text_ends_with_the_context(how, positions, embedded, tokens):
    model = build(positions=positions)

    def written(tokens, **how):
        if embedded:
            return model.generate(inputs_embeds=model.get_input_embeddings()(tokens), **how)
        return model.generate(tokens, **how)

    how = {**PLAIN, "max_new_tokens": 99, **how}
    whole = written(tokens, **how)
    assert whole.shape == (3, 31 if embedded else 40)
    assert torch.equal(whole[:, -31:], model.generate(tokens, **how)[:, 9:])
    with pytest.raises(InputError, match=r"prompt has 40 tokens.*context_length is 40: shorten"):
        written(tokens.repeat(1, 5)[:, :40], **how)
    with pytest.raises(InputError, match=r"sequence has 41 tokens, .* is 40: shorten"):
        model(tokens.repeat(1, 5)[:, :41])


def test_a_pipeline_with_its_defaults_ends_with_the_context(tmp_path):
    save_language_model(build(vocab_size=258), tmp_path, byte_tokenizer())
    write = pipeline("text-generation", model=str(tmp_path), device="cpu")
    streamer = TextIteratorStreamer(write.tokenizer, timeout=60, skip_special_tokens=True)
    text = write("Hello", do_sample=False, streamer=streamer)[0]["generated_text"]
    assert text.startswith("Hello")
    assert "".join(streamer) == text


def test_a_paged_cache_writes_the_same():
    model = build().float()
    prompts = [torch.randint(2, 61, (length,)).tolist() for length in (4, 9, 6)]
    how = GenerationConfig(max_new_tokens=8, do_sample=False, eos_token_id=-1, pad_token_id=0)
    small = ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64)
    found = model.generate_batch(prompts, how, small, progress_bar=False)
    for prompt, output in zip(prompts, found.values(), strict=True):
        alone = model.generate(torch.tensor([prompt]), generation_config=how)
        assert output.generated_tokens == alone[0, len(prompt) :].tolist()


@pytest.mark.slow
@torch.no_grad()  # PyTorch's has no gradient on a CPU
def test_flex_attention_computes_the_same(tokens):
    model = build().float()
    expected = model(tokens, use_cache=False).logits
    model.set_attn_implementation("flex_attention")
    torch.testing.assert_close(model(tokens, use_cache=False).logits, expected)


@pytest.mark.parametrize("auto", [False, True])
def test_weights_for_another_computation_are_refused(auto, tmp_path):
    build().save_pretrained(tmp_path)
    load = (AutoModelForCausalLM if auto else TokenFormerForCausalLM).from_pretrained
    config = AutoConfig.from_pretrained(tmp_path)
    assert (
        load(tmp_path, config=config).config.theta == load(tmp_path, theta="gelu_l2").config.theta
    )
    config.theta = "gelu_l1"
    fault = r"theta is 'gelu_l1', but the weights in .* were trained with 'gelu_l2': set theta="
    for how in ({"theta": "gelu_l1"}, {"config": config}):
        with pytest.raises(InputError, match=fault):
            load(tmp_path, **how)
    with pytest.raises(InputError, match=r"num_heads is 4, .* trained with 2: set num_heads=2"):
        load(tmp_path, num_attention_heads=4)
    assert load(tmp_path, rotary_base=2e4).config.rotary_base == 2e4  # for longer sequences


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


@pytest.mark.slow
def test_compiled_generation_writes_the_same(tokens):
    model = build()
    expected = model.generate(tokens, **PLAIN)
    model.forward = torch.compile(model.forward, fullgraph=True, backend="aot_eager")
    assert torch.equal(model.generate(tokens, cache_implementation="static", **PLAIN), expected)


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
    grow(classifier.model.blocks, num_ffn_param_tokens=160)  # the configuration is not told
    torch.testing.assert_close(classifier(tokens).logits, output.logits)
    classifier.save_pretrained(tmp_path)
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path)
    assert loaded.config.num_ffn_param_tokens == classifier.config.num_ffn_param_tokens == 160
    assert loaded.sizes == (1.0,)
    for each in (classifier, loaded):
        each.set_size(0.5)
    torch.testing.assert_close(loaded(tokens).logits, classifier(tokens).logits)
    assert not torch.allclose(loaded(tokens).logits, output.logits)


# In another process: without our import, and with the finder of classes that transformers copies.
OPEN = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
print(type(model).__module__, type(model).__name__)
model.save_pretrained(sys.argv[2])
"""


@pytest.mark.slow
def test_a_process_without_our_import_opens_a_folder(tmp_path):
    build().save_pretrained(tmp_path / "model")
    places = {"HF_MODULES_CACHE": str(tmp_path / "modules"), "PYTHONPATH": str(ROOT)}
    words = [sys.executable, "-c", OPEN, str(tmp_path / "model"), str(tmp_path / "again")]
    done = subprocess.run(words, capture_output=True, text=True, env={**os.environ, **places})
    assert "tokenformer_vit.language.modeling TokenFormerForCausalLM" in done.stdout, done.stderr
    for name in ("config.json", "modeling_tokenformer.py"):
        files = [(tmp_path / folder / name).read_text() for folder in ("model", "again")]
        assert files[0] == files[1]
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {path.name for path in (tmp_path / "model").iterdir()}


def test_code_that_a_configuration_names_never_runs(tmp_path):
    build().save_pretrained(tmp_path)
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
