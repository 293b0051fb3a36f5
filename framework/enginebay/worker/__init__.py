"""The worker: one rank's device, model, cache and batch. It knows tensors; it knows no request queue and no policy."""
