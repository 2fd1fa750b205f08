"""lowtide from scratch: train inside a memory budget, with the same numbers to the bit, in one file.

Run it: `python docs/from_scratch.py`. It needs only torch and does not import lowtide. Read it from top to bottom.
"""

import weakref
from collections import namedtuple
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

torch.set_num_threads(1)


# ---- 1. A training step ----------------------------------------------------------------------------------------------
# Eight layers with dropout, a loss, the backward pass, an update: ordinary PyTorch. While the forward pass runs,
# autograd keeps what the backward pass will read: each layer's input, what went into its GELU, its dropout mask. All of
# that is in memory at once when the backward pass starts. This is the peak that we want to lower.
def step(parameters, x, y):
    """Take one step of gradient descent."""
    h = x
    for weight, bias in zip(parameters[::2], parameters[1::2], strict=True):
        h = h + F.dropout(F.gelu(F.linear(h, weight, bias)), 0.1)
    loss = F.cross_entropy(h, y)
    loss.backward()
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(parameter.grad, alpha=-0.5)
            parameter.grad = None
    return loss.detach()


def start():
    """Make the same parameters and the same batch each time."""
    torch.manual_seed(0)
    parameters = [(torch.randn(shape) / 20).requires_grad_() for shape in [(128, 128), (128,)] * 8]
    return parameters, torch.randn(2048, 128), torch.randint(128, (2048,))


# ---- 2. The step becomes data ----------------------------------------------------------------------------------------
# PyTorch lets us stand between it and its kernels: a dispatch mode is handed every call, those of the backward pass and
# of the update too, in the order in which they run. On fake tensors, which have sizes but no memory, the whole step
# passes by without any arithmetic. We write each call down as an `Op`.
#
# A value is what a storage (a block of memory) holds at one time. A call that writes in place makes a new value of an
# old storage, so a value never changes. A view (transpose, slice, detach) makes no value and is no op: it is a way to
# read a value, by sizes, strides and offset. So a tensor is known by its storage, and an argument is a `Read`.
#
# An op's `outputs` are the values that it makes on new storages. Its `updates` are pairs (new, old): it writes over
# old, and then new is there. `makes` are all that is new, `gone` all that is old, `reads` all that its arguments read.

Read = namedtuple("Read", "value view")
Op = namedtuple("Op", "kernel args kwargs outputs updates reads makes gone random seconds")


def look(tensor):
    """How a tensor sees its storage."""
    return tuple(tensor.shape), tuple(tensor.stride()), int(tensor.storage_offset())


def tensors_in(things):
    """The tensors among what a call takes or returns."""
    return [t for t in (things if isinstance(things, tuple | list) else [things]) if isinstance(t, torch.Tensor)]


class Recorder(TorchDispatchMode):
    """Writes down every call."""

    def __init__(self):
        super().__init__()
        self.graph = SimpleNamespace(ops=[], nbytes=[], looks=[])  # nbytes and look of each value
        self.now = {}  # storage -> its present value; a weak reference keeps its address from being used again

    def new_value(self, tensor, seen):
        self.graph.nbytes.append(tensor.untyped_storage().nbytes())
        self.graph.looks.append(seen)
        self.now[StorageWeakRef(tensor.untyped_storage())] = value = len(self.graph.nbytes) - 1
        return value

    def value_of(self, tensor):
        return self.now.get(StorageWeakRef(tensor.untyped_storage()))

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        result, marks = kernel(*args, **(kwargs or {})), [a.alias_info for a in kernel._schema.arguments]
        written = [arg for arg, mark in zip(args, marks, strict=False) if mark is not None and mark.is_write]
        fresh = [tensor for tensor in tensors_in(result) if self.value_of(tensor) is None]
        if not written and not fresh:
            return result  # a view, which is no op
        seen = [Read(self.value_of(arg), look(arg)) if isinstance(arg, torch.Tensor) else arg for arg in args]
        gone = [self.value_of(tensor) for tensor in written]
        new = [self.new_value(tensor, self.graph.looks[old]) for tensor, old in zip(written, gone, strict=True)]
        outputs = [self.new_value(tensor, look(tensor)) for tensor in fresh]
        # What a second run costs: its arithmetic or its traffic, whichever takes longer. (The package uses a clock.)
        count, moved = flop_registry.get(kernel.overloadpacket), tensors_in(args) + tensors_in(result)
        flops = count(*args, **(kwargs or {}), out_val=result) if count else 0
        seconds = 1e-6 + max(flops / 5e10, sum(tensor.nbytes for tensor in moved) / 1e10)
        reads = {arg.value for arg in seen if isinstance(arg, Read)}
        random = torch.Tag.nondeterministic_seeded in kernel.tags
        updates, makes = list(zip(new, gone, strict=True)), {*outputs, *new}
        self.graph.ops.append(Op(kernel, seen, kwargs or {}, outputs, updates, reads, makes, {*gone}, random, seconds))
        return result


def record(step, parameters, *batch):
    """Run the step on fake tensors, and return what it did."""
    with FakeTensorMode() as mode, Recorder() as recorder:
        fakes = [mode.from_tensor(tensor) for tensor in [*parameters, *batch]]
        recorder.graph.inputs = [recorder.new_value(fake, look(fake)) for fake in fakes]  # there before the step
        loss = step(fakes[: len(parameters)], *fakes[len(parameters) :])
        recorder.graph.results = [recorder.value_of(tensor) for tensor in [*fakes, loss]]  # there after it
    return recorder.graph


# ---- 3. A plan is a program ------------------------------------------------------------------------------------------
# Four instructions say all that can be done: `Run(op)` and `Free(value)`, and for memory elsewhere `Copy(value, to)`
# and `Wait(value)`. To recompute is to Run twice. Here we need the first two.
#
# The order of the runs settles the rest, for a value is best freed right after its last reader. So we plan with a
# schedule: a list of op numbers in which an op may come more than once. `arrange` adds the Frees. It walks backwards
# with the set of values that are still needed; a value that an op touches and nobody needs afterwards dies there.

Run = namedtuple("Run", "op again")  # again: it has run before, and must draw the same random numbers
Free = namedtuple("Free", "value")


def arrange(graph, schedule):
    """The program of a schedule, and the values needed before each run; None if the schedule makes no sense."""
    needed, program, before = set(graph.results), [], []
    for place, number in reversed(list(enumerate(schedule))):
        op = graph.ops[number]
        if needed & op.gone:
            return None  # somebody still needs what this op writes over
        dying = (op.reads | op.makes) - needed - op.gone - set(graph.inputs)
        program += [*map(Free, dying), Run(number, again=number in schedule[:place])]
        needed = needed - op.makes | op.reads
        before.append(needed)
    return (program[::-1], before[::-1]) if needed <= set(graph.inputs) else None


# ---- 4. Memory is added up -------------------------------------------------------------------------------------------
# The step is data and the plan is a program, so the peak is a sum: nothing has to run.
def simulate(graph, program, above=0):
    """The bytes in use above this level during each run."""
    live, curve = sum(graph.nbytes[value] for value in graph.inputs), []
    for item in program:
        if isinstance(item, Free):
            live -= graph.nbytes[item.value]
        else:
            live += sum(graph.nbytes[value] for value in graph.ops[item.op].outputs)
            curve.append(max(0, live - above))
    return curve


# ---- 5. Recompute until it fits --------------------------------------------------------------------------------------
# Look at the peak. Some values are idle there: made before, read later, not touched now. One of them can be made again
# right before its next reader; `arrange` then frees it in between. Take the one that costs the fewest seconds for each
# byte by which this lowers what is over the budget. Repeat until nothing is.
def remake(graph, there, value):
    """The ops that make a value from what is there."""
    if value in there or value in graph.inputs:
        return []
    maker = next(number for number, op in enumerate(graph.ops) if value in op.makes)
    order = [number for read in graph.ops[maker].reads for number in remake(graph, there, read)]
    there |= graph.ops[maker].makes
    return [*order, maker]


def plan(graph, budget):
    """A schedule with a peak within the budget, or None where this search finds none."""
    schedule = list(range(len(graph.ops)))
    while True:
        program, before = arrange(graph, schedule)
        over = simulate(graph, program, budget)
        if not any(over):
            return schedule
        place, options = over.index(max(over)), []
        for value in before[place] - graph.ops[schedule[place]].reads - {*graph.inputs, *graph.results}:
            reader = next(p for p in range(place, len(schedule)) if value in graph.ops[schedule[p]].reads)
            again = remake(graph, before[reader] - {value}, value)
            longer = schedule[:reader] + again + schedule[reader:]
            if (found := arrange(graph, longer)) and (less := sum(over) - sum(simulate(graph, found[0], budget))) > 0:
                options.append((sum(graph.ops[number].seconds for number in again) / less, longer))
        if not options:
            return None
        schedule = min(options)[1]


# ---- 6. The judge ----------------------------------------------------------------------------------------------------
# A planner that checks itself believes its own mistakes. The judge is slow and plain, and shares no code with the
# above: it keeps a dictionary of what is there, and adds all of it up at every run.
def judge(graph, program):
    """Refuse a program that is wrong; say the peak of one that is right."""
    there, ran, peak = {value: graph.nbytes[value] for value in graph.inputs}, [-1], 0
    for item in program:
        if isinstance(item, Free):
            del there[item.value]
            continue
        op = graph.ops[item.op]
        assert all(arg.value in there for arg in op.args if isinstance(arg, Read)), f"{op.kernel} reads what is gone"
        assert item.again == (item.op in ran), f"{op.kernel} does not know whether it has run before"
        assert item.again or not op.random or item.op > max(ran), f"{op.kernel} draws its numbers out of turn"
        for new, old in op.updates:
            assert not (item.again and old in graph.inputs), f"{op.kernel} updates a parameter twice"
            there[new] = there.pop(old)
        there.update({value: graph.nbytes[value] for value in op.outputs})
        ran.append(item.op)
        peak = max(peak, sum(there.values()))
    assert sorted(there) == sorted(graph.results), "the step ends with too little or too much"
    return peak


# ---- 7. Run it -------------------------------------------------------------------------------------------------------
# The program becomes Python source: one line a call, `del` for Free. The kernels are those that eager PyTorch calls, on
# tensors of the same sizes and strides, so the bits are the same. Only random ops need help: before the first run of
# one that runs again we keep the generator's state; the second run goes back to it, and afterwards to the present.
def generate(graph, program):
    """The lines of the program as Python, and the function that they make."""
    names, lines = {"torch": torch}, ["@torch.no_grad()", "def run(parameters, *batch):"]
    lines += [f"    {', '.join(f't{value}' for value in graph.inputs)} = [*parameters, *batch]"]
    twice = {item.op for item in program if isinstance(item, Run) and item.again}

    def show(arg):
        if not isinstance(arg, Read):
            return repr(arg)
        return f"t{arg.value}" + ("" if arg.view == graph.looks[arg.value] else f".as_strided{arg.view}")

    for item in program:
        if isinstance(item, Free):
            lines.append(f"    del t{item.value}")
            continue
        op, kernel = graph.ops[item.op], str(graph.ops[item.op].kernel).replace(".", "_")
        names[kernel], names[f"k{item.op}"] = op.kernel, op.kwargs
        call = f"{kernel}({', '.join([*map(show, op.args), *([f'**k{item.op}'] if op.kwargs else [])])})"
        call = ", ".join(f"t{value}" for value in op.outputs) + " = " * bool(op.outputs) + call
        if op.random and item.again:
            call = f"with torch.random.fork_rng([]): torch.set_rng_state(s{item.op}); {call}"
        elif op.random and item.op in twice:
            call = f"s{item.op} = torch.get_rng_state(); {call}"
        lines += [f"    {call}", *(f"    t{new} = t{old}; del t{old}" for new, old in op.updates)]
    exec("\n".join([*lines, f"    return t{graph.results[-1]}"]), names)
    return lines, names["run"]


class Meter(TorchDispatchMode):
    """Adds up the storages that are really there: a prediction is worth what its measurement says."""

    def __init__(self):
        super().__init__()
        self.there, self.peak = {}, 0

    def see(self, tensors):
        for storage in (tensor.untyped_storage() for tensor in tensors):
            if storage._cdata not in self.there:
                self.there[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.there.pop, storage._cdata)
        self.peak = max(self.peak, sum(self.there.values()))

    def __torch_dispatch__(self, kernel, types, args=(), kwargs=None):
        result = kernel(*args, **(kwargs or {}))
        self.see(tensors_in(result))
        return result


def train(run):
    """Three steps from the same start: losses, parameters and generator state; and the metered peak."""
    parameters, x, y = start()
    with Meter() as meter:
        meter.see([*parameters, x, y])
        losses = [run(parameters, x, y).item() for _ in range(3)]
    return [torch.tensor(losses), *parameters, torch.get_rng_state()], meter.peak


# Now all of it together: for each budget plan, judge, run three steps, and compare with eager PyTorch.
graph, (expected, eager) = record(step, *start()), train(step)
persistent = sum(graph.nbytes[value] for value in graph.inputs)
own, seconds = eager - persistent, sum(op.seconds for op in graph.ops)
print(f"In eager PyTorch a step of {len(graph.ops)} ops adds {own / 1e6:.2f} MB to {persistent / 1e6:.2f} MB.")
print("\nbudget  predicted    metered  run again  more work  same bits  memory over the step")
for percent in (100, 75, 50, 35, 25, 5):
    budget = persistent + own * percent // 100
    if (schedule := plan(graph, budget)) is None:
        most = max(sum(graph.nbytes[value] for value in (op.reads - op.gone) | op.makes) for op in graph.ops)
        print(f"{percent:5}%  no plan: {budget / 1e6:.2f} MB, but one op alone touches {most / 1e6:.2f} MB")
        break
    program, _ = arrange(graph, schedule)
    curve, (lines, run) = simulate(graph, program), generate(graph, program)
    peak, (found, metered) = judge(graph, program), train(run)
    assert peak == max(curve) == metered, "the judge, the simulator and the meter do not agree"
    assert all(map(torch.equal, expected, found)), "the numbers are not those of eager PyTorch"
    again, more = len(schedule) - len(graph.ops), sum(graph.ops[n].seconds for n in schedule) / seconds - 1
    tops = [max(curve[at * len(curve) // 36 : (at + 1) * len(curve) // 36]) for at in range(36)]
    plot = "".join(" ▁▂▃▄▅▆▇█"[-(-8 * (top - persistent) // own)] for top in tops)
    print(f"{percent:5}% {peak / 1e6:7.2f} MB {metered / 1e6:7.2f} MB  {again:9}  {more:9.1%}        yes  {plot}")
print("\nA layer's dropout, made again at the last of these budgets:\n")
print("\n".join(lines[next(n for n, line in enumerate(lines) if "fork_rng" in line) - 1 :][:5]))
