"""gem list and gem doctor: what is declared, and what this machine can run of it."""

from gem.commands.common import Device, Expression, Paths
from gem.errors import RequestError


def list_cases(paths: Paths = None, k: Expression = None, device: Device = "auto") -> None:
    """Show the declared cases, and whether this machine has what they need."""
    from gem.harness import environment, table
    from gem.harness.suites import load_suites

    cases = load_suites(paths or [], k)
    facts = environment.facts(device)
    console = table.make_console()
    for one in table.list_tables(cases, facts):
        console.print(one)
        console.print()
    lacking = sum(table.check_needs(case.needs, facts) is not None for case in cases)
    console.print(f"{len(cases)} cases, {len(cases) - lacking} of them can run here on {facts.device}")


def doctor(paths: Paths = None, device: Device = "auto") -> None:
    """Say what this machine can run, and of the rest why not."""
    from gem.harness import doctor as doctor_
    from gem.harness import environment, table
    from gem.harness.suites import load_suites

    console = table.make_console()
    cases = []
    try:
        cases = load_suites(paths or [])
    except RequestError as error:
        if paths:
            raise
        # Asked about the machine, not about the suites: theirs is one more line of the answer.
        console.print(f"suites: {error}")
    doctor_.report(cases, environment.facts(device), console)
