# A TokenFormer of 0.15 M parameters on the bytes of tiny Shakespeare, for the language ablations.
#
# Data:      tokenformer-vit prepare-text input.txt data/tinyshakespeare_64 --context-length 64 \
#                --val-share 0.1
# Batch:     32
# Hardware:  one CPU core; minutes in ablations/TABLES.md
# Command:   tokenformer-vit train configs/lm_micro.py
# Expected:  the figures of ablations/TABLES.md
_base_ = "_base_/language_small.py"

model = dict(
    config=dict(
        context_length=64,
        embed_dim=64,
        depth=2,
        num_heads=4,
        num_qkv_param_tokens=64,
        num_proj_param_tokens=64,
        num_ffn_param_tokens=256,
        rotary_share=0.5,  # a quarter of a head of 16 would be four dimensions
    )
)
train_dataloader = dict(dataset=dict(data_root="data/tinyshakespeare_64"))
val_dataloader = dict(dataset=dict(data_root="data/tinyshakespeare_64"))
test_dataloader = val_dataloader
train_cfg = dict(max_iters=1000, val_interval=100)
