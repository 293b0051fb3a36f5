"""Laws of the scheduler bay, and the simulated device that they run a policy or a whole scheduler over."""
