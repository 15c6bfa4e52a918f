"""Data of a training: images, augmentation, mixing and the order of the samples."""
