"""The laws of schedulers, on ``acme_sjf`` under the built-in mechanics."""

from enginebay.conformance import SchedulerConformance


class TestAcmeSjf(SchedulerConformance):
    """Cases come from what the record claims."""

    plugin = "acme_sjf"
