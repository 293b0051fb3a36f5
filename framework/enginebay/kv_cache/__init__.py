"""KV block accounting on the host: which blocks are free, and which request holds which.

It knows integers only. It does not know tensors, tokens' contents, devices, or why a request wants a block.
"""
