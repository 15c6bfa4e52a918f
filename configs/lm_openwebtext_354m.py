# The next model of the growth series: lm_openwebtext_124m with 2140 / 8560 pairs trains on 30
# billion more tokens, with a new warm-up and cosine.
#
# Paper:     perplexity 14.02 on OpenWebText (arXiv:2410.23168, Figure 3), with random new pairs
# Data:      as for lm_openwebtext_124m; run that config first
# Batch:     480 = 8 GPUs x 12 with 5 steps
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/lm_openwebtext_354m.py --launcher pytorch --amp \
#                --batch-size 12 --cfg-options optim_wrapper.accumulative_counts=5
#            (the two stages after it: model.checkpoint=work_dirs/lm_openwebtext_354m with 4850 and
#            19400 pairs, then 8620 and 34480)
# Expected:  not run
_base_ = "lm_openwebtext_124m.py"

model = dict(
    config=dict(_delete_=True),
    checkpoint="work_dirs/lm_openwebtext_124m",
    growth=dict(
        num_qkv_param_tokens=2140,
        num_proj_param_tokens=2140,
        num_ffn_param_tokens=8560,
        init="random",  # as in the paper; zero_key would keep the smaller model's output
    ),
)
param_scheduler = _base_.param_scheduler
param_scheduler[0].end = param_scheduler[1].begin = 600
train_cfg = dict(max_iters=60_000)
