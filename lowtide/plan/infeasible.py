"""No plan fits: which values must be together, and what would help."""

from __future__ import annotations

from collections.abc import Iterable

from lowtide.errors import BudgetError
from lowtide.plan.exact import useful
from lowtide.plan.problem import Problem


def floor(problem: Problem) -> tuple[int, int]:
    """A number of bytes that no program can do without, and the op that needs them."""
    costs = problem.costs
    replaceable = problem.optional.astype(bool)
    replaceable[problem.table.instead_of] = True
    needs = {-1: 0}
    for op in useful(problem):
        if replaceable[op]:
            continue
        reads = problem.reads[problem.read_start[op] : problem.read_start[op + 1]]
        makes = problem.makes[problem.make_start[op] : problem.make_start[op + 1]]
        pairs = range(problem.over_start[op], problem.over_start[op + 1])
        saved = sum({int(problem.over_made[k]): int(problem.nbytes[problem.over_made[k]]) for k in pairs}.values())
        held = int(problem.nbytes[reads].sum() + problem.nbytes[makes].sum()) - saved
        needs[op] = held + costs.fewest_temporaries(op)
    largest = max(needs, key=needs.__getitem__)
    return problem.persistent + needs[largest], largest


def explain(problem: Problem, budget: int, least: int, method: str = "lowtide") -> BudgetError:
    """What to tell a person whose budget nothing fits."""
    graph, costs = problem.graph, problem.costs
    least_possible, op = floor(problem)
    item = graph.ops[op]
    values = dict.fromkeys((*graph.reads[op], *item.makes))
    rows = [f"  {costs.nbytes[value]:>14,} B  {graph.show(value)}" for value in _largest(values, costs.nbytes)]
    if temporaries := costs.fewest_temporaries(op):
        rows.append(f"  {temporaries:>14,} B  temporaries inside the op")
    where = " ".join(filter(None, (item.module, item.source)))
    copies = bool(problem.copies.moves) and costs.staging
    through = f", with the {costs.staging:,} that copies go through where there are any" if copies else ""
    who = "no plan found" if method == "lowtide" else f"{method} finds no plan"
    return BudgetError(
        f"{who} within {budget:,} bytes, of which {problem.persistent:,} persist between steps.\n"
        f"No step can do with less than {least_possible:,}: {item.name} ({where}) needs these together:\n"
        + "\n".join(rows)
        + f"\nThe least peak that was reached is {least:,} bytes{through}.",
        hint=f'a budget of {least:,} bytes can be planned ("least" finds as few as can be); for less, lower the batch '
        "size or the widest layer.",
        least=least,
        budget=budget,
    )


def _largest(values: Iterable[int], nbytes: tuple[int, ...]) -> list[int]:
    return sorted(values, key=lambda value: -nbytes[value])[:6]
