"""Run by torchrun in a test of faults: `gem train` in a folder, a rank of which is killed in the first attempt."""

import os
import sys

import ranks_program

PLAN = {"expert": 2, "tables": "v3", "table_replicas": 2}

if __name__ == "__main__":
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    fault = ranks_program.Fault("SIGKILL") if first else None
    ranks_program.main(ranks_program.CONFIG | {"plan": PLAN}, sys.argv[1], fault)
