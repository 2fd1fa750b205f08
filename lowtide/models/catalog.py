"""The built-in models by name, and the reading of a target such as resnet:depth=50,batch=16."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from lowtide.errors import UsageError
from lowtide.models.bert import bert
from lowtide.models.chains import mlp, tanh_chain
from lowtide.models.densenet import densenet121
from lowtide.models.dynamicconv import dynamicconv
from lowtide.models.gpt import gpt
from lowtide.models.hugging_face import hf_bert, hf_gpt2, installed
from lowtide.models.optimizers import make_optimizer
from lowtide.models.options import Option, options_of
from lowtide.models.recurrent import gru, lstm
from lowtide.models.resnet import resnet
from lowtide.models.steps import Recipe, Step
from lowtide.models.unet import unet
from lowtide.models.unrolled import deep_rnn, lstm_cell
from lowtide.models.wide_resnet import wrn_28_2

Builder = Callable[..., Recipe]

ALWAYS: tuple[Builder, ...] = (
    mlp,
    tanh_chain,
    resnet,
    wrn_28_2,
    densenet121,
    unet,
    gpt,
    bert,
    lstm,
    gru,
    lstm_cell,
    deep_rnn,
    dynamicconv,
)
WITH_TRANSFORMERS: tuple[Builder, ...] = (hf_gpt2, hf_bert)

LISTED = ALWAYS + WITH_TRANSFORMERS if installed() else ALWAYS
BUILDERS: Mapping[str, Builder] = {builder.__name__.replace("_", "-"): builder for builder in LISTED}
OPTIMIZER_OPTIONS = options_of(make_optimizer)
LISTING = "`lowtide models` lists every model with its options"


@dataclass(frozen=True)
class Entry:
    """One built-in model, as `lowtide models` lists it."""

    name: str
    summary: str  # one sentence
    options: Mapping[str, Option]  # its own first, then those of the optimizer


class Target(NamedTuple):
    """A built-in model and the options that were given for it."""

    name: str
    options: Mapping[str, Any]


def catalog() -> tuple[Entry, ...]:
    """List the built-in models that can be built here."""
    return tuple(_entry(name) for name in BUILDERS)


def build(target: str) -> tuple[Step, nn.Module, Optimizer, tuple[Any, ...]]:
    """Build the step, model, optimizer and example of a target, equal each time, random state left alone."""
    name, given = parse(target)
    own = {key: value for key, value in given.items() if key not in OPTIMIZER_OPTIONS}
    shared = {key: value for key, value in given.items() if key in OPTIMIZER_OPTIONS}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(0)
        step, model, example = BUILDERS[name](**own)
    model.train()
    return step, model, make_optimizer(model.parameters(), **shared), example


def parse(target: str) -> Target:
    """Split a target into its name and its options, and read each option as what it is."""
    name, colon, text = target.partition(":")
    if name not in BUILDERS:
        raise UsageError(
            f"there is no built-in model {name!r}; there are {', '.join(BUILDERS)}",
            hint=_closest(name, BUILDERS) or LISTING,
        )
    options = _entry(name).options
    given: dict[str, Any] = {}
    for assignment in text.split(",") if colon else ():
        key, equals, value = assignment.partition("=")
        if not equals:
            raise UsageError(f"{assignment!r} in {target!r} sets no option", hint=f"write {name}:batch=2")
        if key not in options:
            raise UsageError(
                f"{name} has no option {key!r}; it has {', '.join(options)}",
                hint=_closest(key, options) or LISTING,
            )
        if key in given:
            raise UsageError(f"{target!r} gives {key} twice", hint=f"keep one {key}=...")
        given[key] = _read(name, key, value, options[key])
    return Target(name, given)


def _entry(name: str) -> Entry:
    """Describe one model by the docstring and the signature of the function that builds it."""
    builder = BUILDERS[name]
    return Entry(name, inspect.getdoc(builder) or "", {**options_of(builder), **OPTIMIZER_OPTIONS})


def _read(name: str, key: str, text: str, option: Option) -> Any:
    """Read the text of one option."""
    default = "what suits the others" if option.default is None else option.text
    try:
        return option.type.read(text)
    except ValueError as error:
        raise UsageError(
            f"{name}: {key}={text} is not {option.type}",
            hint=_closest(text, option.type.choices) or f"leave {key} out for its default, {default}",
        ) from error


def _closest(word: str, known: Iterable[str]) -> str | None:
    """Suggest the known word that is most like this one."""
    matches = get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f"did you mean {matches[0]}?" if matches else None
