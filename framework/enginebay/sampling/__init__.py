"""Sampling: the parameters of a request, and the sampler that ends every step."""
