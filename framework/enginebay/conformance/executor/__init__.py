"""Laws of the executor bay, and the worker that stands in for the real one."""
