"""The classics on graphs: every sequence is valid and within its budget, and what they are known for holds."""

from __future__ import annotations

import itertools
from random import Random

import numpy as np
import pytest
from graphs import cases
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.check import check
from lowtide.costs import Costs, declared
from lowtide.graph import Graph, Input, Op, Output, Phase, Read, Value
from lowtide.plan.classics import CLASSICS
from lowtide.plan.classics.chain import Backward, Forward
from lowtide.plan.classics.cut import cheapest
from lowtide.plan.classics.measured import measured_chain
from lowtide.plan.classics.rotor import Rotor
from lowtide.plan.classics.saved import cheap
from lowtide.plan.classics.segments import segments
from lowtide.plan.classics.tape import Links
from lowtide.plan.emit import emit
from lowtide.plan.order import captured_order, early_updates
from lowtide.plan.problem import Ints, Problem, problem
from lowtide.simulate import simulate

SOME = settings(max_examples=80, derandomize=True, deadline=None)
CHAINS = ("chen-budget", "chen-recursive", "revolve", "gruslys-hidden", "gruslys-internal", "gruslys-mixed", "rotor")


class Builder:
    """Builds a graph op by op."""

    def __init__(self) -> None:
        self.values: list[Value] = []
        self.ops: list[Op] = []
        self.inputs: list[Input] = []

    def value(self, nbytes: int, storage: int | None = None) -> int:
        number = len(self.values)
        place = number if storage is None else storage
        self.values.append(Value(f"v{number}", nbytes, "activation", place, shape=(nbytes,), stride=(1,)))
        return number

    def given(self, nbytes: int) -> int:
        number = self.value(nbytes)
        self.inputs.append(Input(number, (number,)))
        return number

    def op(self, target: str, reads: tuple[int, ...], sizes: tuple[int, ...], phase: Phase, **more: bool) -> list[int]:
        made = [self.value(size) for size in sizes]
        args = tuple(map(Read, dict.fromkeys(reads)))
        self.ops.append(
            Op(f"{target}{len(self.ops)}", f"aten.{target}.default", args, (), tuple(made), phase=phase, **more)
        )
        return made

    def update(self, target: str, old: int, reads: tuple[int, ...], phase: Phase, **more: bool) -> int:
        new = self.value(self.values[old].nbytes, self.values[old].storage)
        args = tuple(map(Read, (old, *reads)))
        self.ops.append(
            Op(f"{target}{len(self.ops)}", f"aten.{target}.default", args, updates=((new, old),), phase=phase, **more)
        )
        return new

    def graph(self, outputs: list[int]) -> Graph:
        results = tuple(Output(value, "result", (number,)) for number, value in enumerate(outputs))
        return Graph(tuple(self.ops), tuple(self.values), tuple(self.inputs), results)


def uniform_chain(length: int) -> Graph:
    """`length` equal steps, each of which the backward needs the output of, as tanh does."""
    build = Builder()
    states = [build.given(0)]
    for _ in range(length):
        states += build.op("tanh", (states[-1],), (64,), "forward")
    (gradient,) = build.op("ones", (), (64,), "backward")
    for state in reversed(states[1:]):
        (gradient,) = build.op("tanh_backward", (gradient, state), (64,), "backward")
    return build.graph([gradient])


def training_step(random: Random, layers: int) -> tuple[Graph, Costs]:
    """Products and activations with parameters, skips, dropout and buffers; its backward; its updates at the end."""
    build = Builder()

    def size() -> int:
        return 64 * random.randint(1, 3)

    state = build.given(64)
    tape: list[tuple[str, tuple[int, ...], int, int]] = []  # target, what the backward reads, parameter, bytes
    results: list[int] = []
    states = [state]
    for _ in range(layers):
        entering = state
        kind = random.choice(("mm", "mm", "tanh", "dropout", "norm", "add"))
        if kind == "mm":
            weight = build.given(size())
            (state,) = build.op("mm", (state, weight), (size(),), "forward")
            tape.append((kind, (entering, weight), weight, build.values[entering].nbytes))
        elif kind == "tanh":
            (state,) = build.op("tanh", (state,), (build.values[state].nbytes,), "forward")
            tape.append((kind, (state,), -1, build.values[entering].nbytes))
        elif kind == "dropout":
            (mask,) = build.op("bernoulli", (state,), (size(),), "forward", channels=("generator",))
            (state,) = build.op("mul", (state, mask), (build.values[state].nbytes,), "forward")
            tape.append((kind, (mask,), -1, build.values[entering].nbytes))
        elif kind == "norm":
            results.append(build.update("count_", build.given(8), (), "forward"))
            (state,) = build.op("norm", (state,), (build.values[state].nbytes,), "forward")
            tape.append((kind, (entering,), -1, build.values[entering].nbytes))
        else:
            (state,) = build.op("add", (state, random.choice(states)), (build.values[state].nbytes,), "forward")
            tape.append((kind, (), -1, build.values[entering].nbytes))
        states.append(state)
    results += build.op("loss", (state,), (4,), "forward")
    (gradient,) = build.op("loss_backward", (state,), (build.values[state].nbytes,), "backward")
    updates = []
    for kind, reads, weight, nbytes in reversed(tape):
        if weight >= 0:
            updates.append((weight, *build.op("mm", (gradient, reads[0]), (build.values[weight].nbytes,), "backward")))
        (gradient,) = build.op(f"{kind}_backward", (gradient, *reads), (nbytes,), "backward")
    results += [build.update("step_", weight, (change,), "update") for weight, change in updates]
    graph = build.graph([*results, gradient])
    costs = declared(graph)
    seconds = tuple(float(random.randint(1, 4)) for _ in graph.ops)
    arena_temporaries = tuple(random.choice((0, 0, 64)) for _ in graph.ops)
    in_place = tuple(
        tuple((m, r) for m in makes for r in reads if m != r and costs.nbytes[m] == costs.nbytes[r])
        if random.random() < 0.3
        else ()
        for reads, makes in zip(graph.reads, graph.makes, strict=True)
    )
    return graph, Costs(costs.graph, seconds, arena_temporaries, costs.nbytes, in_place, "roofline", "unit")


steps = st.builds(lambda seed, layers: training_step(Random(seed), layers), st.integers(0, 2**32), st.integers(1, 14))


def assert_valid(arrays: Problem, sequence: Ints, budget: int | None) -> None:
    """The judge accepts the program, and its peak is the predicted one, states of the generator aside."""
    graph = arrays.graph
    program = emit(arrays, sequence)
    found = check(graph, arrays.costs, program)
    assert found == simulate(graph, arrays.costs, program).peak
    ops = sequence.tolist()
    states = 2 * sum(graph.generator_bytes for op in set(ops) if graph.ops[op].random and ops.count(op) > 1)
    assert found <= arrays.peak(sequence) + states
    assert budget is None or arrays.peak(sequence) <= budget


def assert_classic(name: str, arrays: Problem, order: Ints) -> None:
    find = CLASSICS[name].prepare(arrays, order)
    natural = find(None)
    assert natural is not None
    assert_valid(arrays, natural, None)
    high = arrays.peak(order)
    for part in (1.0, 0.7, 0.4, 0.1):
        budget = int(arrays.persistent + part * (high - arrays.persistent))
        sequence = find(budget)
        if sequence is not None:
            assert_valid(arrays, sequence, budget)


@pytest.mark.parametrize("name", CLASSICS)
@SOME
@given(case=cases())
def test_every_classic_is_valid_on_any_graph(name: str, case) -> None:
    arrays = problem(case.graph, case.costs)
    assert_classic(name, arrays, captured_order(case.graph))


@pytest.mark.parametrize("name", CLASSICS)
@SOME
@given(step=steps)
def test_every_classic_is_valid_on_training_steps(name: str, step: tuple[Graph, Costs]) -> None:
    arrays = problem(*step)
    assert_classic(name, arrays, early_updates(step[0]))


# -------------------------------------------------------------------------------------------- what they are known for


def forwards(arrays: Problem, sequence: Ints) -> int:
    return sum(arrays.graph.ops[op].phase == "forward" for op in sequence.tolist())


def test_chen_takes_two_square_roots_of_a_chain_and_at_most_one_more_forward() -> None:
    arrays = problem(graph := uniform_chain(100), declared(graph))
    order = captured_order(graph)
    for name in ("chen-sqrt", "chen-budget"):
        sequence = CLASSICS[name](arrays, order)
        assert sequence is not None
        assert arrays.peak(sequence) <= 21 * 64
        assert forwards(arrays, sequence) <= 2 * 100


def test_the_recursion_takes_a_logarithm_of_a_chain() -> None:
    arrays = problem(graph := uniform_chain(256), declared(graph))
    sequence = CLASSICS["chen-recursive"](arrays, captured_order(graph))
    assert sequence is not None
    assert arrays.peak(sequence) <= (np.log2(256) + 4) * 64


@pytest.mark.parametrize("name", [*CHAINS, "rockmate"])
def test_chains_fit_into_what_is_given_and_more_memory_is_never_slower(name: str) -> None:
    arrays = problem(graph := uniform_chain(60), declared(graph))
    find = CLASSICS[name].prepare(arrays, captured_order(graph))
    last = np.inf
    for count in (18, 24, 30, 45, 61, 64):
        sequence = find(count * 64)
        assert sequence is not None
        assert arrays.time(sequence) <= last
        last = arrays.time(sequence)
    assert name not in ("rotor", "rockmate") or last == len(graph.ops)


def test_rotor_is_as_quick_on_a_graph_as_its_table_says() -> None:
    """A step of the chain hands on what its backward reads, so internals are states; four more are at work."""
    arrays = problem(graph := uniform_chain(50), declared(graph))
    chain = segments(arrays, captured_order(graph))
    assert len(chain.parts) == 50
    sizes, menus = measured_chain(chain, menus=False)
    table = Rotor(sizes.in_units(64), 30)
    for memory in range(8, 31, 2):
        schedule = table.schedule(memory)
        assert schedule is not None
        sequence = chain.replay(schedule, menus)
        assert arrays.peak(sequence) <= memory * 64
        assert forwards(arrays, sequence) <= table.seconds(memory)


@SOME
@given(steps, st.booleans())
def test_a_table_predicts_the_peak_and_the_seconds(step: tuple[Graph, Costs], menus: bool) -> None:
    """The chain is conservative: what it says fits does, but for what is always kept and never counted."""
    arrays, order = problem(*step), early_updates(step[0])
    chain = segments(arrays, order)
    sizes, keeps = measured_chain(chain, menus=menus)
    made = {value for part in chain.parts for op in part.forward for value in step[0].makes[op]}
    uncounted = int(arrays.nbytes[sorted(made - chain.droppable)].sum())
    own = (arrays.peak(order) - arrays.persistent) // 4
    table = Rotor(sizes.in_units(4), own)
    base = arrays.time(order) - float(sizes.seconds.sum())
    for memory in (own, own * 3 // 4, own // 2):
        schedule = table.schedule(memory)
        if schedule is not None:
            sequence = chain.replay(schedule, keeps)
            assert arrays.peak(sequence) - arrays.persistent - uncounted <= memory * 4
            assert arrays.time(sequence) <= base + table.seconds(memory) + 1e-6


@SOME
@given(steps)
def test_keeping_all_internals_is_the_order_itself(step: tuple[Graph, Costs]) -> None:
    arrays = problem(*step)
    chain = segments(arrays, early_updates(step[0]))
    numbers = range(len(chain.parts))
    everything = [Forward(number, "internals") for number in numbers]
    sequence = chain.replay([*everything, *map(Backward, reversed(numbers))])
    assert sorted(sequence.tolist()) == list(range(len(step[0].ops)))
    assert_valid(arrays, sequence, None)


@SOME
@given(steps, st.integers(1, 9))
def test_segments_share_out_all_ops_and_say_what_crosses(step: tuple[Graph, Costs], most: int) -> None:
    graph = step[0]
    chain = segments(problem(*step), early_updates(graph), most=most)
    assert len(chain.parts) <= most
    ops = [op for part in chain.parts for op in (*part.forward, *part.backward)]
    assert sorted(ops) == list(range(len(graph.ops)))
    for number, part in enumerate(chain.parts):
        before = set[int]().union(*(other.made for other in chain.parts[:number]))
        needed = {value for op in (*part.forward, *part.backward) for value in graph.reads[op]}
        assert needed & before <= part.entering <= before
        assert part.internals <= needed & part.made - part.leaving


# ----------------------------------------------------------------------------------------------------------- saved sets


@settings(max_examples=60, derandomize=True, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 7))
def test_the_minimum_cut_saves_the_fewest_bytes(seed: int, layers: int) -> None:
    graph, costs = training_step(Random(seed), layers)
    arrays = problem(graph, costs)
    forward = [op for op in range(len(graph.ops)) if graph.ops[op].phase == "forward"]
    backward = [op for op in range(len(graph.ops)) if graph.ops[op].phase == "backward"]
    made = [value for op in forward for value in graph.makes[op]]
    wanted = {value for op in backward for value in graph.reads[op] if value in made}
    may = {op for op in forward if cheap(graph, op) and arrays.repeatable[op]}
    to_run = np.array([0.0 if op in may else np.inf for op in range(len(graph.ops))])
    keep = cheapest(Links(arrays), forward, wanted, arrays.nbytes.astype(float), to_run)

    def suffices(kept: set[int]) -> bool:
        there = set(kept)
        for op in forward:
            if op in may and all(read in there or read not in made for read in graph.reads[op]):
                there |= set(graph.makes[op])
        return wanted <= there

    assert suffices(set(keep))
    sizes = {value: int(arrays.nbytes[value]) for value in made}
    worth = [value for value in made if sizes[value]]
    subsets = (set(some) for count in range(len(worth) + 1) for some in itertools.combinations(worth, count))
    free = set(made) - set(worth)
    fewest = min(sum(sizes[value] for value in some) for some in subsets if suffices(some | free))
    assert sum(sizes[value] for value in keep) == fewest


def test_cheap_ops_are_told_by_their_names() -> None:
    names = ["mm", "convolution", "_scaled_dot_product_flash_attention_for_cpu", "mkldnn_rnn_layer", "addmm"]
    names += ["relu_", "native_batch_norm", "add", "gelu", "cat", "bernoulli_"]
    build = Builder()
    for name in names:
        build.op(name, (), (4,), "forward", channels=("generator",) if name == "bernoulli_" else ())
    graph = build.graph([])
    assert [name for op, name in enumerate(names) if cheap(graph, op)] == [
        "relu_",
        "native_batch_norm",
        "add",
        "gelu",
        "cat",
    ]


def test_dropping_the_cheap_ops_saves_products_only() -> None:
    build = Builder()
    state, weights = build.given(64), [build.given(64) for _ in range(4)]
    saved, wanted = [], []
    for weight in weights:
        (state,) = build.op("mm", (state, weight), (64,), "forward")
        saved.append(state)
        (state,) = build.op("relu", (state,), (64,), "forward")
        wanted.append(state)
    (gradient,) = build.op("ones", (), (64,), "backward")
    for state in reversed(wanted):
        (gradient,) = build.op("backward", (gradient, state), (64,), "backward")
    graph = build.graph([gradient])
    arrays = problem(graph, declared(graph))
    for name in ("drop-cheap", "torch-min-cut"):
        sequence = CLASSICS[name](arrays, captured_order(graph))
        assert sequence is not None
        again = [graph.ops[op].target for op in sequence.tolist()].count("aten.relu.default")
        assert (again, forwards(arrays, sequence)) == ((8, 12) if name == "drop-cheap" else (4, 8))


def test_what_an_update_wrote_over_is_kept_instead() -> None:
    """The parameter is updated before the first output is read for the last time: then nothing can make it again."""
    build = Builder()
    start, weight = build.given(64), build.given(64)
    (state,) = build.op("relu", (start, weight), (64,), "forward")
    (other,) = build.op("relu", (state,), (64,), "forward")
    (gradient,) = build.op("ones", (other,), (64,), "backward")
    new = build.update("step_", weight, (gradient,), "update")
    (result,) = build.op("backward", (gradient, state), (64,), "backward")
    graph = build.graph([new, result])
    arrays = problem(graph, declared(graph))
    for name, classic in CLASSICS.items():
        sequence = classic(arrays, captured_order(graph))
        assert sequence is not None, name
        assert 0 not in sequence.tolist()[sequence.tolist().index(3) :]
        assert_valid(arrays, sequence, None)


def test_every_classic_says_what_it_is() -> None:
    for classic in CLASSICS.values():
        assert classic.summary
        assert classic.summary[0].islower()
