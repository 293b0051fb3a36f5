"""The built-in batching mechanics, which a `SchedulingPolicy` steers.

Host-side only: numpy and Python. It does not know tensors, models, or how a step is run.
"""
