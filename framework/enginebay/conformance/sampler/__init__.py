"""Laws of the sampler bay, and the rows that a logits processor is tried on."""
