"""Benchmarks: one workload, run by our engine or a peer's in a process of its own, and the figures that come of it.

`driver` is the script that runs in the engine's interpreter; `process` talks to it; `engines` says how a configuration
reaches each engine; `workload`, `figures`, `document`, `show` and `plot` are the work and what is made of its times. The
package asserts no speed.
"""
