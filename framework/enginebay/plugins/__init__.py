"""The plugin system: what a plugin says of itself, how it is found, and how one is chosen for each bay.

Nothing in this package imports torch. It knows records and requirements; it does not know how a kernel, a model or a
scheduler works.
"""
