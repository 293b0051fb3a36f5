"""Laws of the model bay, and the transformers twin that they measure against."""
