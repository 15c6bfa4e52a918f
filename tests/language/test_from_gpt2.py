"""A GPT-2 of random weights becomes a TokenFormer that computes and writes the same."""

import json

import pytest
import torch
from timm.utils import reparameterize_model
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, GPT2LMHeadModel

from tokenformer_vit.cli import convert
from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.language import byte_tokenizer, from_gpt2, save_language_model

SHAPE = {"vocab_size": 258, "n_positions": 40, "n_embd": 32, "n_layer": 3, "n_head": 4}
SPECIAL = {"bos_token_id": 256, "eos_token_id": [256, 7], "pad_token_id": 257}
KINDS = {"plain": {}, "erf": {"activation_function": "gelu"}}
KINDS["untied"] = {"tie_word_embeddings": False, "layer_norm_epsilon": 1e-3, "n_inner": 50}
OTHERS = {"scale_attn_weights": False, "add_cross_attention": True}
OTHERS |= {"scale_attn_by_inverse_layer_idx": True, "activation_function": "relu"}


def build(**changes):
    """Return a GPT-2 whose norms, biases and sizes of weights are not those it starts with."""
    model = GPT2LMHeadModel(GPT2Config(**SHAPE | SPECIAL | changes)).eval()
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.randn_like(tensor), alpha=0.3)
            elif ".c_" in name:
                tensor.mul_(8)
    model.generation_config.repetition_penalty = 1.1
    return model


@torch.no_grad()
def relative_error(model, gpt2):
    """Return the error of the logits, relative to those of GPT-2 in float64."""
    tokens = torch.randint(258, (3, 40))
    exact = gpt2.double()(tokens).logits
    gpt2.float()
    logits = torch.stack((model(tokens).logits.double(), exact))
    ours, theirs = logits - logits.mean(dim=-1, keepdim=True)
    return (ours - theirs).norm() / theirs.norm()


@pytest.mark.parametrize("draw", range(3))
@pytest.mark.parametrize("kind", KINDS)
def test_the_logits_are_those_of_gpt2(seed, draw, kind):
    torch.manual_seed(seed + draw)
    changes = KINDS[kind]
    gpt2 = build(**changes)
    model = from_gpt2(gpt2, [torch.randint(258, (3, 40))] if draw else ())
    assert relative_error(model, gpt2) < 2e-5
    assert not model.training
    is_tied = model.lm_head.weight is model.model.embedding.weight
    assert is_tied == model.config.tie_embeddings == changes.get("tie_word_embeddings", True)


def test_it_writes_the_same_text():
    gpt2 = build()
    model = from_gpt2(gpt2)
    greedy = {"max_new_tokens": 20, "min_new_tokens": 20, "do_sample": False}
    prompts = torch.randint(256, (3, 9))
    mask = torch.ones_like(prompts)
    prompts[0, :4], mask[0, :4] = 257, 0
    for use_cache in (True, False):
        how = {"attention_mask": mask, "use_cache": use_cache, **greedy}
        text = model.generate(prompts, **how)
        assert text.shape == (3, 29)
        assert text.equal(gpt2.generate(prompts, **how))


def test_it_grows(tmp_path):
    gpt2 = build()
    model = from_gpt2(gpt2)
    with pytest.raises(InputError, match="fused"):  # nothing could load it
        reparameterize_model(model).save_pretrained(tmp_path / "fused")
    grow(model, num_qkv_param_tokens=96, num_proj_param_tokens=160, num_ffn_param_tokens=256)
    assert relative_error(model, gpt2) < 2e-5


def test_other_models_and_layers_are_refused_by_name():
    for name, value in OTHERS.items():
        with pytest.raises(InputError, match=rf"{name} is {value!r}|ReLU\(\) is not GELU"):
            from_gpt2(build(**{name: value}))
    gpt2 = build()
    with pytest.raises(InputError, match="it is a GPT2Model; give a plain GPT2LMHeadModel"):
        from_gpt2(gpt2.transformer)
    hook = gpt2.transformer.h[1].mlp.register_forward_hook(lambda *args: 2 * args[2])
    with pytest.raises(InputError, match=r"h\.1\.mlp has a forward hook"):
        from_gpt2(gpt2)
    hook.remove()
    gpt2.transformer.h[0].ln_1.weight.data[0] = torch.nan
    with pytest.raises(InputError, match="outputs are not finite"):
        from_gpt2(gpt2)
    gpt2.transformer.h[1].mlp.c_fc = torch.nn.Bilinear(32, 1, 128)
    with pytest.raises(InputError, match=r"transformer\.h\.1\.mlp\.c_fc is a Bilinear"):
        from_gpt2(gpt2)


def test_the_command(tmp_path, capsys):
    gpt2, source, target = build(), tmp_path / "gpt2", tmp_path / "tokenformer"
    save_language_model(gpt2.half(), source, byte_tokenizer())
    with pytest.raises(InputError, match="leave out --num-heads"):
        convert.main([str(source), str(target), "--num-heads", "4"])
    file = source / "config.json"
    config = file.read_text()
    file.write_text(json.dumps({**json.loads(config), "architectures": ["GPT2Classifier"]}))
    with pytest.raises(InputError, match="is a GPT2Classifier"):
        convert.main([str(source), str(target)])
    assert not target.exists()
    file.write_text(config)
    convert.main([str(source), str(target)])
    out = capsys.readouterr().out
    model = AutoModelForCausalLM.from_pretrained(target)
    assert f"Parameters: {gpt2.num_parameters():,} -> {model.num_parameters():,}\n" in out
    assert "same top-1 class, of 80 random tokens\n" in out
    assert ", with a tokenizer" in out
    assert relative_error(model, gpt2) < 2e-5
    assert model.generation_config.to_diff_dict() == gpt2.generation_config.to_diff_dict()
    assert {name: getattr(model.config, name) for name in SPECIAL} == SPECIAL
    assert AutoTokenizer.from_pretrained(target).decode([72, 105]) == "Hi"
