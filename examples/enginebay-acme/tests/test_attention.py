"""The laws of attention backends, on ``acme``."""

from enginebay.conformance import AttentionConformance


class TestAcme(AttentionConformance):
    """Cases come from what the record claims."""

    plugin = "acme"
