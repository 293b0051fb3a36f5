"""Loading: where weights come from (sources), and how a model's parameters are filled from them, strictly."""
