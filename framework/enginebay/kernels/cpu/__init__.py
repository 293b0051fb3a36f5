"""Fused kernels for the CPU, compiled at first use. `ops` has their typed wrappers, `library` builds and loads them."""
