# TokenFormer-B/16 with the parts of ViT-5, by its recipe, first stage at 192 px: 114,739,432
# parameters. The recipe is DeiT III's; the model has rotary positions, four register tokens,
# RMSNorm, normalised queries and keys, and LayerScale. Norms in blocks have no weights here.
#
# Paper:     none; ViT-5's ViT-B: 84.2 % top-1 after both stages (arXiv:2602.08071)
# Batch:     2048 = 8 GPUs x 256
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/vit5_base.py --launcher pytorch --amp
# Expected:  not run
_base_ = "_base_/deit3.py"

model = dict(backbone=dict(model_name="tokenformer_base_rope_reg4", norm="rms"))
