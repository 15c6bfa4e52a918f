"""Speed and memory of models: how they are measured, and how a record of them is shown."""
