"""Our language models in other libraries: fine-tuned by TRL, and with LoRA by peft."""

import pytest
import torch

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.language import TokenFormerConfig, TokenFormerForCausalLM, byte_tokenizer
from tokenformer_vit.language.generation import load_language_model, save_language_model

pytestmark = pytest.mark.slow  # importing the libraries takes longer than the tests

SHAPE = {"vocab_size": 258, "context_length": 64, "embed_dim": 32, "depth": 2, "num_heads": 2}
SHAPE |= {"positions": "learned", "tie_embeddings": False, "pattention_args": {"learn_tau": True}}
TEN_STEPS = {"max_steps": 10, "per_device_train_batch_size": 4, "learning_rate": 1e-2}
TEN_STEPS |= {"save_strategy": "no", "use_cpu": True, "bf16": False, "logging_steps": 1}
TEN_STEPS |= {"report_to": [], "disable_tqdm": True}
LORA = {"r": 4, "target_parameters": ["key_param_tokens", "value_param_tokens"]}
LORA |= {"target_modules": [], "task_type": "CAUSAL_LM"}


def pieces(length):
    """Draw a text, and cut it into pieces of this length."""
    words = ("the", "model", "reads", "a", "text", "and", "writes", "what", "follows", "it")
    text = " ".join(words[index] for index in torch.randint(len(words), (700,)))
    return [text[start : start + length] for start in range(0, len(text), length)]


@pytest.mark.parametrize("how", ["SFT", "SFT packed", "DPO"])
def test_fine_tuning_by_trl(how, tmp_path):
    trl = pytest.importorskip("trl", reason="pip install trl")
    from datasets import Dataset

    options, rows = {"max_length": 48, **TEN_STEPS}, {"text": pieces(40)}
    if how == "DPO":
        lines = pieces(20)
        rows = {"prompt": lines[:-1:2], "chosen": lines[1::2]}
        rows["rejected"] = ["0" * len(line) for line in rows["chosen"]]
    else:
        options["packing"] = how == "SFT packed"
    trainer, config = (getattr(trl, f"{how[:3]}{name}") for name in ("Trainer", "Config"))
    model = TokenFormerForCausalLM(TokenFormerConfig(**SHAPE))
    save_language_model(model, tmp_path / "start", byte_tokenizer())
    rows, config = Dataset.from_dict(rows), config(tmp_path / "run", **options)
    trainer = trainer(model=str(tmp_path / "start"), args=config, train_dataset=rows)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert losses[-1] < losses[0]
    before = dict(model.named_parameters())
    for name, each in trainer.model.named_parameters():
        assert not torch.equal(each, before[name])
    trainer.save_model(tmp_path / "saved")
    tokens = torch.randint(258, (2, 20))
    with torch.no_grad():
        loaded = load_language_model(tmp_path / "saved")
        torch.testing.assert_close(loaded(tokens).logits, trainer.model.eval()(tokens).logits)


@torch.no_grad()
def test_lora_by_peft_is_saved_loaded_and_merged(tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    model = TokenFormerForCausalLM(TokenFormerConfig(**SHAPE)).eval()
    tokens = torch.randint(258, (2, 20))
    model.save_pretrained(tmp_path / "model")
    plain = model(tokens).logits
    adapted = peft.get_peft_model(model, peft.LoraConfig(**LORA))
    torch.testing.assert_close(adapted(tokens).logits, plain)
    optimizer = torch.optim.AdamW(adapted.parameters(), 1e-2)
    with torch.enable_grad():
        for _ in range(5):
            adapted(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = adapted(tokens).logits
    assert not torch.allclose(expected, plain, atol=1e-2)
    with pytest.raises(InputError, match=r"wrapped by ParamWrapper.*after merge_and_unload\(\)"):
        grow(adapted, num_ffn_param_tokens=160)
    # two matrices in each of five layers of two blocks
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 20

    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        load_language_model(tmp_path / "model"), tmp_path / "adapter"
    ).eval()
    torch.testing.assert_close(loaded(tokens).logits, expected)
    merged = loaded.merge_and_unload()
    assert type(merged) is TokenFormerForCausalLM
    grow(merged, num_ffn_param_tokens=160)
    torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    loaded = load_language_model(tmp_path / "merged")
    torch.testing.assert_close(loaded(tokens).logits, merged(tokens).logits)
