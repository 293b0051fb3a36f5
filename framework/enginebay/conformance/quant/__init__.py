"""Laws of the quant bay, and the checkpoints that they are tried on."""
