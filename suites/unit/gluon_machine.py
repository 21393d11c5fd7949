"""What of a Hopper GPU runs beside a kernel's own instructions, on the host: copies, products, barriers; who is next.

Partitions of programs are coroutines, of which one runs at a time. At each instruction that touches barriers, shared
memory or an asynchronous unit a seeded draw decides who goes on: another partition, a copy that lands, a product that
reads its operands or ends. So a seed is one of the orders that the hardware may choose, and can be had again.

What cannot be seen: races between warps of one partition, layouts, the compiler's own reordering, speed.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable

import torch
from gluon_memory import Fault, Race, Shared
from greenlet import getcurrent, greenlet
from torch import Tensor


class Deadlock(Fault):
    """Nobody can go on."""


class BarrierFault(Fault):
    """Arrivals or bytes that a barrier's phase has no room for."""


_MOST_STEPS = 200_000
_MOST_POLLS = 100


# -- who is next -------------------------------------------------------------------------------------------------------


class Signal:
    """Workers that wait for something to change."""

    __slots__ = ("waiting",)

    def __init__(self) -> None:
        self.waiting: list[Worker] = []

    def tell(self) -> None:
        for worker in self.waiting:
            worker.machine.schedule(worker)
        self.waiting.clear()


class Worker:
    """A partition of a program, or a program before it is divided."""

    def __init__(self, machine: "Machine", name: str, program: int, body: Callable[[], None]) -> None:
        self.machine, self.name, self.program, self.body = machine, name, program, body
        self.pace = machine.draw_pace()
        self.polls = (
            0  # looks at a flag, one after the other: each takes twice as long, so that no order takes for ever
        )
        self.coroutine = greenlet(self._live, machine.hub)
        self.waits_for: Callable[[], str] | None = None
        self.done = False
        self.ended = Signal()
        self.queue: deque[Product] = deque()  # in the tensor core's queue
        self.issued: list[Product] = []  # that it has not waited for
        self.stores: list[Store] = []  # likewise
        self.unwritten: list[Store] = []  # that have not reached global memory
        self.moved = Signal()  # a product ended, or a store has read or written
        self.unfenced: list[Shared] = []  # what it wrote since its last fence
        self.started: list[Barrier] = []  # likewise

    def _live(self) -> None:
        self.body()
        for left, call in ((self.issued, "warpgroup_mma_wait"), (self.stores, "store_wait")):
            if left:
                raise Fault(f"{self.name} ended without {call} for {left[0].text()}")
        self.done = True
        self.ended.tell()


class Machine:
    """Workers and units, and when they go on: after random times, longer or shorter by who it is, a few very long.

    Seeds differ in character too: by their remainder by 4 the units' times are mixed, so long that they act when nobody
    else can, or so short that nothing waits for them; or partitions differ in pace by up to a million.
    """

    def __init__(self, seed: int, programs: int) -> None:
        self.random = random.Random(seed)
        self.programs = programs
        self.hub = getcurrent()
        self.workers: list[Worker] = []
        self.current: Worker | None = None
        self._unit_pace = {1: 1e9, 2: 1e-9}.get(seed % 4, 1.0)
        self._spread = 6.0 if seed % 4 == 3 else 2.0
        self._now = 0.0
        self._steps = 0
        self._coming: list[tuple[float, int, Worker | Callable[[], None]]] = []  # a heap

    def draw_pace(self) -> float:
        return 10.0 ** (self._spread * self.random.random())

    def spawn(self, name: str, program: int, body: Callable[[], None]) -> Worker:
        worker = Worker(self, name, program, body)
        self.workers.append(worker)
        self.schedule(worker)
        return worker

    def schedule(self, worker: Worker) -> None:
        self._put(worker.pace * self._time(1 / 256) * 2.0**worker.polls, worker)

    def later(self, action: Callable[[], None]) -> None:
        """Have a unit do something at some time."""
        self._put(self._unit_pace * 10.0 ** (3.0 * self.random.random()) * self._time(1 / 16), action)

    def _time(self, rare: float) -> float:
        return self.random.random() * (1e4 if self.random.random() < rare else 1.0)

    def _put(self, delay: float, what: "Worker | Callable[[], None]") -> None:
        self._steps += 1
        heapq.heappush(self._coming, (self._now + delay, self._steps, what))

    def run(self) -> None:
        """Until all workers are done and all units at rest."""
        try:
            while self._coming:
                self._step()
            stuck = [f"{w.name} waits for {w.waits_for()}" for w in self.workers if not w.done and w.waits_for]
            if stuck:
                raise Deadlock("nobody can go on:\n  " + "\n  ".join(stuck))
        finally:
            for worker in self.workers:
                if not worker.coroutine.dead:
                    worker.coroutine.throw()

    def _step(self) -> None:
        if self._steps > _MOST_STEPS:
            raise Fault(f"no end after {_MOST_STEPS} steps")
        if self.random.random() < 0.02:
            self.random.choice(self.workers).pace = self.draw_pace()
        self._now, _, what = heapq.heappop(self._coming)
        if not isinstance(what, Worker):
            what()
            return
        self.current = what
        what.coroutine.switch()
        if not what.waits_for and not what.coroutine.dead:
            self.schedule(what)

    def running(self) -> Worker:
        assert self.current is not None
        return self.current

    def turn(self, polls: bool = False) -> Worker:
        """Called by the worker that runs, and returned: others may go first."""
        worker = self.running()
        worker.polls = worker.polls + 1 if polls else 0
        if worker.polls > _MOST_POLLS:
            raise Deadlock(f"{worker.name} looks at a flag that nobody raises")
        self.hub.switch()
        return worker

    def wait(self, worker: Worker, signal: Signal, reached: Callable[[], bool], what: Callable[[], str]) -> None:
        """Go on when ``reached``, which ``signal`` tells to look at again."""
        while not reached():
            signal.waiting.append(worker)
            worker.waits_for = what
            self.hub.switch()
            worker.waits_for = None


# -- barriers ----------------------------------------------------------------------------------------------------------


class Barrier:
    """An mbarrier: a phase ends when its arrivals are all in and its expected bytes have come."""

    def __init__(self, name: Callable[[], str]) -> None:
        self.name = name
        self.count = self.left = self.bytes = self.phases = 0
        self.fenced = False
        self.flipped = Signal()

    def init(self, count: int) -> None:
        if self.count:
            raise BarrierFault(f"{self.name()} is initialised twice")
        self.count = self.left = count

    def invalidate(self) -> None:
        self._check()
        self.count = 0
        self.fenced = False

    def arrive(self, count: int) -> None:
        self._check()
        if count > self.left:
            raise BarrierFault(f"{count} arrivals at {self.name()}, whose phase {self.phases} waits for {self.left}")
        self.left -= count
        self._flip()

    def expect(self, count: int) -> None:
        """Bytes, and an arrival."""
        self._check()
        self.bytes += count
        self.arrive(1)

    def deliver(self, count: int) -> None:
        """Bytes have come."""
        self._check()
        if not self.fenced:
            raise Race(f"a copy signals {self.name()}, behind whose init stands no fence_async_shared")
        if count > self.bytes:
            raise BarrierFault(f"{count} bytes came for {self.name()}, whose phase {self.phases} expects {self.bytes}")
        self.bytes -= count
        self._flip()

    def passed(self, parity: int) -> bool:
        """Whether the phase of that parity has ended, the newest or the one before it."""
        self._check()
        return self.phases & 1 != parity

    def text(self) -> str:
        return f"{self.name()} in phase {self.phases}, which lacks {self.left} arrivals and {self.bytes} bytes"

    def _flip(self) -> None:
        if self.left == 0 and self.bytes == 0:
            self.phases += 1
            self.left = self.count
            self.flipped.tell()

    def _check(self) -> None:
        if not self.count:
            raise BarrierFault(f"{self.name()} is used without init")


# -- units -------------------------------------------------------------------------------------------------------------


class Loaded:
    """Registers filled from shared memory: at the latest when they are used, which the hardware waits for."""

    __slots__ = ("_read", "_value", "dtype", "shape")

    def __init__(self, machine: Machine, worker: Worker, source: Shared) -> None:
        self.dtype, self.shape = source.dtype, source.shape
        self._read = lambda: source.read(lambda: f"a load of {worker.name}").to(source.dtype)
        self._value: Tensor | None = None
        machine.later(self._arrive)

    def value(self) -> Tensor:
        if self._value is None:
            self._value = self._read()
        return self._value

    def _arrive(self) -> None:
        self.value()


class Product:
    """a b + acc, by the tensor core, one after the other: what it reads must stay until it has ended.

    Of ``a`` in registers it is given how to get it, of shared memory the place.
    """

    dtype = torch.float32

    def __init__(
        self, machine: Machine, worker: Worker, a: "Shared | Callable[[], Tensor]", b: Shared,
        acc: "Tensor | Product | None", shape: list[int],
    ) -> None:  # fmt: skip
        self.machine, self.worker, self.a, self.b, self.acc, self.shape = machine, worker, a, b, acc, shape
        self.waited = False
        self._read_a = a.read_async(self.text) if isinstance(a, Shared) else None
        self._read_b = b.read_async(self.text)
        self._result: Tensor | None = None
        worker.issued.append(self)
        worker.queue.append(self)
        if len(worker.queue) == 1:
            machine.later(self._end)

    def text(self) -> str:
        return f"a product of {self.worker.name} with {self.b.name()}"

    def value(self) -> Tensor:
        if not self.waited:
            raise Race(f"{self.text()} is used before it is waited for")
        return self.result()

    def result(self) -> Tensor:
        assert self._result is not None
        return self._result

    def _end(self) -> None:
        if self._read_a is None:
            assert not isinstance(self.a, Shared)
            a = self.a().float()
        else:
            assert isinstance(self.a, Shared)
            a = self._read_a
            self.a.unchanged(a, self.text)
        self.b.unchanged(self._read_b, self.text)
        self._result = a @ self._read_b
        if self.acc is not None:
            self._result += self.acc.result() if isinstance(self.acc, Product) else self.acc
        queue = self.worker.queue
        queue.popleft()
        if queue:
            self.machine.later(queue[0]._end)
        self.worker.moved.tell()


def wait_products(machine: Machine, worker: Worker, most: int) -> None:
    """Until at most so many are under way."""
    machine.wait(worker, worker.moved, lambda: len(worker.queue) <= most, lambda: worker.queue[0].text())
    ended = max(len(worker.issued) - most, 0)
    for product in worker.issued[:ended]:
        product.waited = True
    del worker.issued[:ended]


def copy_in(machine: Machine, into: Shared, barrier: Barrier, source: Callable[[], Tensor], count: int) -> None:
    """A tile from global memory, whose bytes the barrier is told."""
    into.begin_copy()

    def land() -> None:
        into.end_copy(source())
        barrier.deliver(count)

    machine.later(land)


class Store:
    """A tile on its way out: read from shared memory at some time, written to global memory at a later one."""

    def __init__(self, machine: Machine, worker: Worker, source: Shared, put: Callable[[Tensor], None]) -> None:
        self.machine, self.worker, self.source, self.put = machine, worker, source, put
        self.read = False
        self._value = source.read_async(self.text)
        worker.stores.append(self)
        worker.unwritten.append(self)
        machine.later(self._read)

    def text(self) -> str:
        return f"a store of {self.worker.name} from {self.source.name()}"

    def _read(self) -> None:
        self.source.unchanged(self._value, self.text)
        self.read = True
        self.worker.moved.tell()
        self.machine.later(self._write)

    def _write(self) -> None:
        self.put(self._value)
        self.worker.unwritten.remove(self)
        self.worker.moved.tell()


def wait_stores(machine: Machine, worker: Worker, most: int) -> None:
    """Until all but the newest so many have read."""
    older = worker.stores[: max(len(worker.stores) - most, 0)]
    machine.wait(worker, worker.moved, lambda: all(x.read for x in older), lambda: older[0].text())
    del worker.stores[: len(older)]


def wait_written(machine: Machine, worker: Worker) -> None:
    """Until all have reached global memory."""
    machine.wait(worker, worker.moved, lambda: not worker.unwritten, lambda: worker.unwritten[0].text())
    worker.stores.clear()
