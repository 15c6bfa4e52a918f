# imagenet_base (114,759,400 parameters) on the parquet files of the Hugging Face hub, not unpacked.
#
# Paper:     as for imagenet_base
# Data:      ILSVRC/imagenet-1k, about 150 GB; accept its terms on the hub, then `hf auth login`
# Batch:     4096 = 32 GPUs x 128, or 8 GPUs x 128 with 4 steps of accumulation
# Hardware:  not run
# Command:   torchrun --nproc_per_node=8 --no-python \
#                tokenformer-vit train configs/imagenet_base_parquet.py --launcher pytorch --amp \
#                --batch-size 128 --cfg-options optim_wrapper.accumulative_counts=4
# Expected:  as imagenet_base: the same images and recipe
_base_ = "imagenet_base.py"

train_dataloader = dict(
    dataset=dict(type="HuggingFaceImages", data_root="hf://datasets/ILSVRC/imagenet-1k")
)
val_dataloader = dict(dataset=dict(train_dataloader["dataset"], split="validation"))
test_dataloader = val_dataloader
