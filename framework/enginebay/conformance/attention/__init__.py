"""Laws of the attention bay, and the float32 answer that they measure against."""
