# digits_demo with growth during the run: a quarter of the pairs, then half, then all.
#
# Data:      tokenformer-vit prepare-data --digits data/digits
# Batch:     64 on a CPU
# Hardware:  2 CPU cores, under a minute
# Command:   tokenformer-vit train configs/growth_digits_demo.py
# Expected:  as digits_demo, at least 97 % top-1, for 60 % of its training FLOPs
_base_ = "digits_demo.py"

model = dict(
    backbone=dict(num_qkv_param_tokens=24, num_proj_param_tokens=24, num_ffn_param_tokens=96)
)
schedule = [
    dict(epoch=13, num_qkv_param_tokens=48, num_proj_param_tokens=48, num_ffn_param_tokens=192),
    dict(epoch=26, num_qkv_param_tokens=96, num_proj_param_tokens=96, num_ffn_param_tokens=384),
]
custom_hooks = [dict(type="CostHook"), dict(type="GrowthHook", schedule=schedule)]
