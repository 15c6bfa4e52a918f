"""Speed, memory and FLOPs of models, and the matched baseline."""
