"""Steps changed by leave, verified: their plan beside the same changed step run plainly, and beside eager's."""

from __future__ import annotations

import json
from typing import Any

import pytest
from test_pairs import fitted, recipe
from typer.testing import CliRunner

import lowtide
from lowtide.cli import app
from lowtide.fit import Fitted
from lowtide.verify import ChangedVerifier
from lowtide.verify.changed import ROUNDING

pytestmark = pytest.mark.filterwarnings("ignore:the next:lowtide.LowtideWarning", "ignore:.*are zero now")


def verified(built: Any, allow: str) -> tuple[Fitted, ChangedVerifier]:
    """The step with these techniques under the plan with the least peak, to be verified."""
    train = fitted(built, allow, least=True)
    train.verify(3)
    assert isinstance(train.verifier, ChangedVerifier)
    return train, train.verifier


@pytest.mark.parametrize(
    "allow",
    ["split", "microbatch:2,batch-statistics:2", "activations8", "weights16,state8,input8", "sparse:0.5,state8"],
)
def test_a_plan_keeps_every_bit_of_the_changed_step(allow: str) -> None:
    built = recipe()
    train, found = verified(built, allow)
    for _ in range(3):
        train(*built[3])
    assert (found.verified, found.left) == (3, 0)
    assert found.tally.tensors > 20
    assert found.off is not None
    assert found.off < 2
    if allow == "split":
        assert found.error is not None
        assert found.error <= ROUNDING


def test_what_a_plan_does_wrong_is_told_from_what_was_allowed() -> None:
    built = recipe()
    train, found = verified(built, "activations8")
    runner = train._latest.runner
    function = runner.function
    runner.function = lambda *args: [output + 1e-6 for output in function(*args)]
    with pytest.raises(lowtide.VerifyError, match="step 1 is not what its rewritten step does without a plan"):
        train(*built[3])
    assert found.verified == 0


def test_rounding_that_is_none_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean of the parts' sums in place of their sum: right in its own terms, and half of what it should be."""
    built = recipe()
    train, found = verified(built, "split")
    plainly = found._plainly
    found._plainly = lambda *args: (plainly(*args)[0], 0.5)
    with pytest.raises(lowtide.VerifyError, match=r"off eager's by 5\.0e-01 of its norm: no rounding is"):
        train(*built[3])


def test_a_model_in_another_form_is_verified_from_its_first_step_on() -> None:
    built = recipe()
    train = fitted(built, "weights16", least=True)
    train(*built[3])
    with pytest.raises(lowtide.UsageError, match="from the first step on"):
        train.verify(1)


def test_what_was_not_needed_is_compared_with_eager() -> None:
    step, model, optimizer, example = recipe()
    train = lowtide.fit(
        step, model, optimizer, example=example, budget="1GB", costs="roofline", allow="lossy", verify=1
    )
    train(*example)
    assert train.verifier is not None
    assert not isinstance(train.verifier, ChangedVerifier)
    assert train.verifier.verified == 1


def test_the_command_line_says_how_far_eager_is() -> None:
    arguments = ["verify", "mlp:batch=64", "--allow", "microbatch:4", "--budget", "45%", "--steps", "2", "--json"]
    answer = CliRunner().invoke(app, [*arguments, "--time-limit", "0.2"])
    assert answer.exit_code == 0, answer.output
    said = json.loads(answer.stdout)
    assert said["verified"] == 2
    if said["rewrites"]:
        assert 0 < said["gradient_error"] <= ROUNDING
        assert said["update_off"] > 0
