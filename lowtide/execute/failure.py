"""What a step that failed half-way had done, so that nobody goes on with a model that is between two steps unawares.

The generator is put back where no parameter was updated. Buffers are not, such as the statistics of a batch norm: that
would take a copy of them at every step, bytes that the plan has not, for something that hardly ever happens. They are
named instead, and nobody is told that the step can be repeated.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from lowtide import device
from lowtide.errors import LowtideError, PlaceError, RankError, StepError
from lowtide.execute.slots import goes_home
from lowtide.execute.source import FILE
from lowtide.graph import Graph
from lowtide.kernels.expected import UnexpectedError
from lowtide.program import Copy, Program, Run

NAMED = 3  # buffers of which an error says the name


def failed(graph: Graph, program: Program, reached: int, error: BaseException, state: bytes | None) -> None:
    """Raise an error that says how far the step came; an interruption only gets a note, and goes on as it is.

    `reached` is the instruction that ran, `state` what the generator had before the step: it is put back where the step
    has updated no parameter, so that it can be repeated.
    """
    if reached < 0 and isinstance(error, LowtideError):
        return  # it has its own words, and nothing was changed
    interrupted = not isinstance(error, Exception)
    between = interrupted or isinstance(error, PlaceError)  # two instructions: the op that it came to is done
    written = _written(graph, program, reached, between=between)
    parameters, buffers, gradients = (
        tuple(dict.fromkeys(name for kind, name in written if kind in kinds))
        for kinds in (("parameter", "state"), ("buffer",), ("gradient",))
    )
    if state is not None and not parameters:
        generator = device.of(graph.device).generator()
        generator.set_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    what, hint = _damage(graph, parameters, buffers, gradients)
    if isinstance(error, UnexpectedError) and not (parameters or buffers or gradients):
        hint = "take this batch by the step itself, without lowtide, or leave it out: the next ones go on by the plan."
    if isinstance(error, RankError):
        hint = error.hint or hint  # whatever this rank has or has not done, it can't go on alone
    message = f"the step {'was interrupted' if interrupted else 'failed'} {_place(graph, program, reached, error)}"
    if interrupted:
        error.add_note(f"{message}. {what}: {hint}")
        return
    raise StepError(
        f"{message}: {type(error).__name__}: {_first_line(error)} {what}.",
        hint=hint,
        parameters=parameters,
        buffers=buffers,
    ) from error


def _damage(
    graph: Graph, parameters: Sequence[str], buffers: Sequence[str], gradients: Sequence[str]
) -> tuple[str, str]:
    """What was changed, and what to do about it."""
    total = sum(graph.values[item.value].kind == "parameter" for item in graph.inputs)
    what = "No parameter and no optimizer state was changed"
    hint = "the step can be repeated."
    if buffers:
        hint = "put the buffers back (from the last checkpoint) before the step is repeated: they have had this batch."
    if gradients:
        hint = "clear the gradients before the step is repeated, and add up those of earlier batches anew."
        hint += " Put the buffers back, too: they have had this batch." if buffers else ""
    if parameters:
        what = f"{len(parameters)} of {total} parameters were updated already"
        hint = "the model is between two steps: load the last checkpoint before going on."
    also = [
        f"{len(names)} {noun}{'s' if len(names) > 1 else ''}"
        for names, noun in ((buffers, "buffer"), (gradients, "gradient"))
        if names
    ]
    some = f" ({', '.join(buffers[:NAMED])}{', ...' if len(buffers) > NAMED else ''})" if buffers else ""
    return what + (f"; {' and '.join(also)} were{some}" if also else ""), hint


def let_go(error: BaseException) -> None:
    """Free the tensors of a step that failed: its error holds the frame that they are in."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == FILE:
            trace.tb_frame.clear()
        trace = trace.tb_next


def _written(graph: Graph, program: Program, reached: int, *, between: bool) -> list[tuple[str, str]]:
    """The kind and name of each input that the step wrote to or, of a gradient, used up.

    The op that it came to counts if the step ended between two instructions, as by an interruption, or if it writes to
    several inputs: it may have failed between two of them.
    """
    inputs = {item.value: item for item in graph.inputs}
    owner = {graph.values[value].storage: item for value, item in inputs.items()}
    found = []
    for number, instruction in enumerate(program.instructions[: max(0, reached + 1)]):
        if isinstance(instruction, Copy) and goes_home(graph, instruction.value, instruction.to):
            found.append(owner[graph.values[instruction.value].storage])
        if isinstance(instruction, Run) and not instruction.again:
            effects = [pair for pair in graph.effects[instruction.op] if graph.home[pair[0]] == "device"]
            if number < reached or between or len(effects) > 1:
                found += [owner[graph.values[old].storage] for _, old in effects]
    if reached >= 0:  # gradients that the step uses up belong to it from its start
        found += [item for item in inputs.values() if not item.persistent]
    return list(dict.fromkeys((graph.values[item.value].kind, str(item.path[0])) for item in found))


def _place(graph: Graph, program: Program, reached: int, error: BaseException) -> str:
    if isinstance(error, PlaceError):
        return "while values were copied"
    instruction = program.instructions[reached] if 0 <= reached < len(program.instructions) else None
    if not isinstance(instruction, Run):
        return "before its first op" if reached < 0 else "while a value was copied"
    op = graph.ops[instruction.op]
    where = ", ".join(filter(None, (op.module, op.source)))
    return f"at {op.name}" + (f" ({where})" if where else "")


def _first_line(error: BaseException) -> str:
    text = (str(error).strip().splitlines() or [""])[0].rstrip(".")
    text = text.replace("std::bad_alloc", "there is no memory left")
    return f"{text}."
