# The Transformer in the form of GPT-2, 124,475,904 parameters, trained like lm_openwebtext_124m.
#
# Paper:     perplexity 17.06 on OpenWebText (arXiv:2410.23168, Figure 3)
# Data:      as for lm_openwebtext_124m
# Batch:     480 = 8 GPUs x 12 with 5 steps
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/lm_openwebtext_transformer.py --launcher pytorch \
#                --amp --batch-size 12 --cfg-options optim_wrapper.accumulative_counts=5
#            For GPT-NeoX's form, add model.config.positions=rotary to --cfg-options.
# Expected:  not run
_base_ = "lm_openwebtext_124m.py"

model = dict(
    architecture="transformer",
    config=dict(
        _delete_=True, vocab_size=50_304, context_length=1024, embed_dim=768, depth=12, num_heads=12
    ),
)
