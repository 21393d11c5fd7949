"""What stands below each command's help: a few command lines that work as they are, in a checkout.

Lines stay below 77 characters, so that a terminal of 80 columns shows them whole and they can be copied.
"""

START = (
    ("what can run here?", "gem doctor"),
    ("is it right, how fast, beside whom?", "gem run --html results/all.html"),
    ("the same on your own histories", "gem run suites/throughput --lengths FILE"),
)
# Command → (what for, command line)s.
EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "run": (
        ("what this machine can run of the project's suites", "gem run --json all.json --html all.html"),
        (
            "one op on the history lengths of your own log, in a minute",
            "gem run suites/throughput/jagged_attention.toml -k cpu_self \\\n"
            "    --lengths fixtures/samples/kuairand.csv --budget 0.5",
        ),
        ("one case, beside one peer", "gem run suites/throughput/gdpa.toml::cpu_pma_q32_d64 --peers padded"),
        ("is it right? without timing", "gem run suites/correctness -k 'hostile and gdpa'"),
        ("go on with a run that was killed: the same command and --resume", "gem run --json all.json --resume"),
        ("a suite of your own", "gem run my_suite.toml"),
    ),
    "list": (
        ("everything that is declared", "gem list"),
        ("the cases that a pattern chooses, as -k of gem run would", "gem list suites/throughput -k 'gdpa and cpu_'"),
        ("what a GPU is needed for", "gem list --device cpu"),
    ),
    "doctor": (
        ("which implementations, peers and cases run here, and why not the rest", "gem doctor"),
        ("the needs of one suite", "gem doctor suites/throughput/e2e.toml"),
    ),
    "train": (
        (
            "a small model on labels whose lowest possible loss is known",
            "gem train fixtures/training/synthetic.toml",
        ),
        (
            "on MovieLens 100K, with results and report",
            "python -m gem.data.fetch ml-100k\ngem train fixtures/training/ml-100k.toml --json t.json --html t.html",
        ),
        (
            "fewer steps, another folder",
            "gem train fixtures/training/synthetic.toml --set steps=20 --out results/few",
        ),
        ("on two processes", "torchrun --nproc-per-node 2 -m gem train fixtures/training/synthetic.toml"),
        (
            "the model cut over them, by a plan",
            "torchrun --nproc-per-node 2 -m gem train \\\n"
            "    fixtures/training/synthetic.toml --plan fixtures/training/plan.toml",
        ),
    ),
    "report": (
        ("a saved document as tables again", "gem report ci/measured/h200/attention.json"),
        ("several as one HTML file", "gem report ci/measured/h200/{attention,gdpa}.json -o report.html"),
    ),
    "gate": (
        ("measure this checkout against main, and judge", "./ci/gate main"),
        (
            "judge again, with a summary for a pull request",
            "gem gate results/gate/base results/gate/new --markdown gate.md",
        ),
        ("two documents of your own", "gem gate before.json after.json --strict"),
    ),
}


def epilog(command: str | None = None) -> str:
    """Examples of a command, or of gem itself, as click takes them: behind a backspace it leaves lines as they are."""
    lines = ["Examples:"]
    for what, line in START if command is None else EXAMPLES[command]:
        lines.append(f"  # {what}")
        lines += [f"  {part}" for part in line.split("\n")]
    return "\b\n" + "\n".join(lines)
