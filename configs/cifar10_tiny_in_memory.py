# cifar10_tiny with its images in memory, on the GPU if there is one, and augmented by the batch.
#
# Paper:     none
# Data:      as for cifar10_tiny
# Batch:     256 on one GPU
# Hardware:  not run
# Command:   tokenformer-vit train configs/cifar10_tiny_in_memory.py --amp
# Expected:  as cifar10_tiny: the same augmentation, with other random numbers
_base_ = "cifar10_tiny.py"

train_dataloader = dict(dataset=dict(type="ImagesInMemory"))
val_dataloader = dict(dataset=dict(type="ImagesInMemory"))
test_dataloader = val_dataloader
