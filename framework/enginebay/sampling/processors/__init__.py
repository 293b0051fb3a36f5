"""Built-in logits processors, one a file, over the interface that plugins use."""
