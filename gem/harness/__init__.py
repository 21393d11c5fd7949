"""The harness: declared cases, isolated workers, interleaved timing, results documents and reports."""
