"""Models under mmpretrain: timm's, autoencoders, students, nested models; and growth."""
