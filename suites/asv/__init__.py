"""asv benchmarks, made from the declared throughput cases."""
