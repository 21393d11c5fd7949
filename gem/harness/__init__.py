"""The harness: declared cases run in isolated workers, checked against float64 oracles, timed beside peers."""
