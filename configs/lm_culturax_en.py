# A language model of GPT-2's size with 512 pairs on English web text, the first of three languages.
#
# Paper:     none; the set-up is from a course report (2024), in which masks were not applied
# Data:      tokenformer-vit prepare-text --hub uonlp/CulturaX --hub-config en data/culturax_en \
#                --tokenizer gpt2 --context-length 1024 --limit-tokens 1000000000, and so fr and es
# Batch:     8
# Command:   tokenformer-vit train configs/lm_culturax_en.py --amp
# Expected:  not run
_base_ = "_base_/language.py"

model = dict(
    config=dict(
        context_length=1024,
        num_qkv_param_tokens=512,
        num_proj_param_tokens=512,
        num_ffn_param_tokens=2048,
        positions="learned",
    )
)
train_dataloader = dict(dataset=dict(data_root="data/culturax_en"))
val_dataloader = dict(
    dataset=dict(data_root=["data/culturax_en", "data/culturax_fr", "data/culturax_es"])
)
test_dataloader = val_dataloader
optim_wrapper = dict(optimizer=dict(lr=5e-4, betas=(0.9, 0.999), weight_decay=0.01))
param_scheduler = []  # the rate is constant
train_cfg = dict(max_iters=100_000, val_interval=2000)
auto_scale_lr = dict(base_batch_size=8)
