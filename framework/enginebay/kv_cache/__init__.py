"""KV block accounting on the host: which blocks are free, which request holds which, and which can be found again.

It knows integers and the keys of blocks. It does not know tensors, devices, or why a request wants a block.
"""
