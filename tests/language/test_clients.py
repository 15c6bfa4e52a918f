"""Our language models in other libraries: TRL, peft, lm-eval, transformers and torchao."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers", reason="pip install '.[language]'")

from transformers import AutoModelForCausalLM, TorchAoConfig, Trainer, TrainingArguments

from tokenformer_vit.errors import InputError
from tokenformer_vit.growth import grow
from tokenformer_vit.language import (
    TokenFormerConfig,
    TokenFormerForCausalLM,
    byte_tokenizer,
    load_language_model,
    save_language_model,
)

pytestmark = pytest.mark.slow  # importing the libraries takes longer than the tests

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"vocab_size": 257, "context_length": 64, "embed_dim": 32, "depth": 2, "num_heads": 2}
KINDS = {
    "tied": {"rotary_share": 0.5},
    "untied": {"rotary_share": 0.5, "tie_embeddings": False},
    "learned tau": {"positions": "learned", "pattention_args": {"learn_tau": True}},
}
TEN_STEPS = {
    "max_steps": 10,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "save_strategy": "no",
    "use_cpu": True,
    "bf16": False,
    "report_to": [],
    "disable_tqdm": True,
}
TASK = """
task: letters
dataset_path: json
dataset_kwargs: {{data_files: {{test: {items}}}}}
output_type: multiple_choice
test_split: test
doc_to_text: "{{{{question}}}}"
doc_to_target: 0
doc_to_choice: "{{{{[a, b]}}}}"
metric_list: [{{metric: acc}}]
"""


def build(**changes):
    return TokenFormerForCausalLM(TokenFormerConfig(**{**SHAPE, **KINDS["tied"], **changes}))


def folder_of(model, folder):
    save_language_model(model, folder, byte_tokenizer())
    return str(folder)


@pytest.fixture
def text():
    words = ("the", "model", "reads", "a", "text", "and", "writes", "what", "follows", "it")
    return " ".join(words[index] for index in torch.randint(len(words), (700,)))


def pieces(text, length=40):
    return [text[start : start + length] for start in range(0, len(text), length)]


def train(trainer, folder):
    """Train; check the losses, the parameters, and the saved folder."""
    model = trainer.model
    before = {name: each.detach().clone() for name, each in model.named_parameters()}
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert len(losses) == 10
    assert all(torch.tensor(losses).isfinite())
    same = [name for name, each in model.named_parameters() if torch.equal(each, before[name])]
    assert not same
    trainer.save_model(folder)
    tokens = torch.randint(257, (2, 20))
    with torch.no_grad():
        expected = model.eval()(tokens).logits
        for loaded in (load_language_model(folder), AutoModelForCausalLM.from_pretrained(folder)):
            torch.testing.assert_close(loaded.eval()(tokens).logits, expected)
    return losses


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("packing", [False, True])
def test_supervised_fine_tuning_by_trl(text, kind, packing, tmp_path):
    trl = pytest.importorskip("trl", reason="pip install trl")
    from datasets import Dataset

    trainer = trl.SFTTrainer(
        model=folder_of(build(**KINDS[kind]), tmp_path / "start"),
        args=trl.SFTConfig(tmp_path / "run", max_length=48, packing=packing, **TEN_STEPS),
        train_dataset=Dataset.from_dict({"text": pieces(text)}),
    )
    losses = train(trainer, tmp_path / "saved")
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("kind", KINDS)
def test_preference_optimisation_by_trl(text, kind, tmp_path):
    trl = pytest.importorskip("trl", reason="pip install trl")
    from datasets import Dataset

    lines = pieces(text, 20)
    lines = lines[: len(lines) // 2 * 2]
    trainer = trl.DPOTrainer(
        model=folder_of(build(**KINDS[kind]), tmp_path / "start"),
        args=trl.DPOConfig(tmp_path / "run", max_length=48, **TEN_STEPS),
        train_dataset=Dataset.from_dict(
            {
                "prompt": lines[::2],
                "chosen": lines[1::2],
                "rejected": ["0" * len(line) for line in lines[1::2]],
            }
        ),
    )
    losses = train(trainer, tmp_path / "saved")
    assert losses[-1] < losses[0]


def test_lora_of_parameter_tokens_by_trl_and_peft(text, tmp_path):
    trl = pytest.importorskip("trl", reason="pip install trl")
    peft = pytest.importorskip("peft", reason="pip install peft")
    from datasets import Dataset

    config = peft.LoraConfig(
        r=4,
        target_modules=[],
        target_parameters=["key_param_tokens", "value_param_tokens"],
        task_type="CAUSAL_LM",
    )
    trainer = trl.SFTTrainer(
        model=folder_of(build(), tmp_path / "start"),
        args=trl.SFTConfig(tmp_path / "run", max_length=48, **TEN_STEPS),
        train_dataset=Dataset.from_dict({"text": pieces(text)}),
        peft_config=config,
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    assert all(
        "lora" in name for name, each in trainer.model.named_parameters() if each.requires_grad
    )


@torch.no_grad()
def test_lora_by_peft_is_saved_loaded_and_merged(tmp_path):
    peft = pytest.importorskip("peft", reason="pip install peft")
    model, tokens = build().eval(), torch.randint(257, (2, 20))
    model.save_pretrained(tmp_path / "model")
    plain = model(tokens).logits
    config = peft.LoraConfig(
        r=4,
        target_modules=[],
        target_parameters=["key_param_tokens", "value_param_tokens"],
        task_type="CAUSAL_LM",
    )
    adapted = peft.get_peft_model(model, config)
    torch.testing.assert_close(adapted(tokens).logits, plain)
    optimizer = torch.optim.AdamW(adapted.parameters(), 1e-2)
    with torch.enable_grad():
        for _ in range(5):
            adapted(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    expected = adapted(tokens).logits
    assert not torch.allclose(expected, plain, atol=1e-2)
    # two matrices in each of five layers of two blocks
    assert sum("lora_A" in name for name, _ in adapted.named_parameters()) == 20

    adapted.save_pretrained(tmp_path / "adapter")
    loaded = peft.PeftModel.from_pretrained(
        load_language_model(tmp_path / "model"), tmp_path / "adapter"
    ).eval()
    torch.testing.assert_close(loaded(tokens).logits, expected)
    with loaded.disable_adapter():
        torch.testing.assert_close(loaded(tokens).logits, plain)
    merged = loaded.merge_and_unload()
    assert type(merged) is TokenFormerForCausalLM
    torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    with pytest.raises(InputError, match="merge_and_unload"):
        grow(adapted, num_ffn_param_tokens=160)
    grow(merged, num_ffn_param_tokens=160)
    torch.testing.assert_close(merged(tokens).logits, expected, atol=1e-4, rtol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    torch.testing.assert_close(
        load_language_model(tmp_path / "merged")(tokens).logits, merged(tokens).logits
    )


def test_an_adapter_of_transformers_is_trained_saved_and_loaded(tmp_path):
    from transformers.integrations.peft import MIN_PEFT_VERSION as NEEDED

    peft = pytest.importorskip("peft", NEEDED, reason=f"pip install 'peft>={NEEDED}'")
    model, tokens = build(), torch.randint(257, (20, 20))
    model.save_pretrained(tmp_path / "model")
    model.add_adapter(
        peft.LoraConfig(
            r=4, target_modules=[], target_parameters=["key_param_tokens", "value_param_tokens"]
        )
    )
    data = [{"input_ids": row, "labels": row} for row in tokens]
    how = {**TEN_STEPS, "save_strategy": "steps", "save_steps": 10}
    Trainer(model, TrainingArguments(tmp_path / "run", **how), train_dataset=data).train()
    saved = tmp_path / "run" / "checkpoint-10"
    assert (saved / "adapter_config.json").is_file()
    assert not (saved / "model.safetensors").exists()
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    with torch.no_grad():
        plain, expected = loaded(tokens).logits, model.eval()(tokens).logits
        loaded.load_adapter(str(saved))
        assert not torch.allclose(expected, plain, atol=1e-2)
        torch.testing.assert_close(loaded.eval()(tokens).logits, expected)


def test_the_harness_opens_a_folder_by_its_own_command(tmp_path):
    pytest.importorskip("lm_eval", reason="pip install '.[evaluation]'")
    folder = folder_of(build(), tmp_path / "run")
    items = tmp_path / "items.jsonl"
    items.write_text(json.dumps({"question": "a or b?", "a": "a", "b": "b"}) + "\n")
    (tmp_path / "task.yaml").write_text(TASK.format(items=items))
    done = subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "hf", "--device", "cpu"),
            *("--model_args", f"pretrained={folder},trust_remote_code=True"),
            *("--tasks", str(tmp_path / "task.yaml")),
        ],
        env={
            **os.environ,
            "PYTHONPATH": str(ROOT),
            "HF_HOME": str(tmp_path / "cache"),
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        },
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "|letters|" in done.stdout


def test_the_trainer_of_transformers_can_leave_a_learned_tau_without_decay(tmp_path):
    class WithoutDecayOfTau(Trainer):  # as README.md says
        def get_decay_parameter_names(self, model):
            names = super().get_decay_parameter_names(model)
            return [name for name in names if not name.endswith("tau")]

    model = build(**KINDS["learned tau"], nested=[0.5])
    arguments = TrainingArguments(tmp_path / "run", weight_decay=0.1, **TEN_STEPS)
    tokens = torch.randint(257, (40, 20))
    data = [{"input_ids": row, "labels": row} for row in tokens]
    trainer = WithoutDecayOfTau(model=model, args=arguments, train_dataset=data)
    optimizer = trainer.create_optimizer()
    names = {id(each): name for name, each in model.named_parameters()}
    decayed = {
        names[id(each)]: group["weight_decay"]
        for group in optimizer.param_groups
        for each in group["params"]
    }
    taus = {name for name in decayed if name.rpartition(".")[2] in ("tau", "nested_tau")}
    assert len(taus) == 20
    assert all(decayed[name] == 0 for name in taus)
    assert all(decay == 0.1 for name, decay in decayed.items() if "param_tokens" in name)
    trainer.train()
    assert all(
        torch.tensor([e["loss"] for e in trainer.state.log_history if "loss" in e]).isfinite()
    )


def test_a_quantisation_that_would_change_nothing_is_refused(tmp_path):
    torchao = pytest.importorskip("torchao.quantization", reason="pip install torchao")
    folder = folder_of(build(), tmp_path / "model")
    config = TorchAoConfig(torchao.Int8WeightOnlyConfig(set_inductor_config=False))
    with pytest.raises(InputError, match=r"quantization_config.*examples/quantize.py"):
        AutoModelForCausalLM.from_pretrained(folder, quantization_config=config)
