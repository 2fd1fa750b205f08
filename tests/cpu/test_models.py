"""The built-in models: each trains, is the same every time, and is the model that its paper defines."""

import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lowtide.errors import UsageError
from lowtide.models import SMALL, build, catalog, parse
from lowtide.models.catalog import BUILDERS
from lowtide.models.dynamicconv import convolve
from lowtide.models.transformer import attend
from lowtide.models.unrolled import ResidualRecurrence, UnrolledCell


def count_parameters(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def build_without_memory(target: str) -> nn.Module:
    with torch.device("meta"):
        return build(target)[1]


@pytest.mark.parametrize("name", SMALL)
def test_a_small_model_trains(name: str) -> None:
    torch.manual_seed(0)
    step, model, optimizer, example = build(SMALL[name])
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    assert model.training
    losses = [step(model, optimizer, *example) for _ in range(4)]
    assert all(loss.shape == () and loss.isfinite() for loss in losses)
    assert losses[-1] < losses[0]
    unchanged = [key for key, parameter in model.named_parameters() if torch.equal(before[key], parameter)]
    # softmax does not see a constant added to every key, so that the bias of the keys has no gradient
    assert all(key.endswith("key.bias") for key in unchanged)


@pytest.mark.parametrize("name", SMALL)
def test_two_builds_are_equal_and_leave_the_random_state_alone(name: str) -> None:
    torch.manual_seed(1)
    state = torch.get_rng_state()
    _, first, _, first_example = build(SMALL[name])
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    _, second, _, second_example = build(SMALL[name])
    for one, other in [
        (list(first.state_dict().values()), list(second.state_dict().values())),
        (tree_leaves(first_example), tree_leaves(second_example)),
    ]:
        assert len(one) == len(other) > 0
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("optimizer", ["sgd", "nesterov", "adam", "adamw", "rmsprop", "adagrad"])
def test_each_optimizer_trains(optimizer: str) -> None:
    step, model, made, example = build(f"{SMALL['mlp']},optimizer={optimizer}")
    losses = [step(model, made, *example) for _ in range(3)]
    assert losses[-1] < losses[0]


def test_the_learning_rate_can_be_given() -> None:
    assert build(f"{SMALL['mlp']},optimizer=adamw,lr=2e-4")[2].param_groups[0]["lr"] == 2e-4


@pytest.mark.parametrize(
    ("target", "parameters"),
    [
        ("wrn-28-2", 1_467_610),
        ("resnet:depth=18", 11_689_512),
        ("resnet:depth=34", 21_797_672),
        ("resnet:depth=50", 25_557_032),
        ("resnet:depth=101", 44_549_160),
        ("resnet:depth=152", 60_192_808),
        ("densenet121", 7_978_856),
        ("dynamicconv", 38_704_128),
        ("hf-gpt2:context=1024", 124_439_808),
    ],
)
def test_a_model_has_the_published_number_of_parameters(target: str, parameters: int) -> None:
    if target.partition(":")[0] not in BUILDERS:
        pytest.skip("transformers is not installed")
    assert count_parameters(build_without_memory(target)) == parameters


def test_a_thousand_layers_can_be_named_by_their_stages() -> None:
    model = build_without_memory("resnet:stages=3-130-197-3,batch=32,size=224")
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 1 + 3 * (3 + 130 + 197 + 3) + 4  # stem, bottlenecks, projections


def test_the_stages_of_a_depth_give_the_same_net() -> None:
    by_depth = build_without_memory("resnet:depth=50")
    assert str(by_depth) == str(build_without_memory("resnet:stages=3-4-6-3"))


def test_blocks_make_other_nets_than_the_published_ones() -> None:
    def convolutions(target: str) -> int:
        return sum(isinstance(module, nn.Conv2d) for module in build_without_memory(target).modules())

    assert convolutions("wrn-28-2") == convolutions("wrn-28-2:blocks=4") == 28  # of which three are projections
    assert convolutions("wrn-28-2:blocks=2") == 16
    assert convolutions("densenet121:stages=6-12-24-16") == convolutions("densenet121") == 120
    assert convolutions("densenet121:stages=1-2-1-1") == 1 + 2 * 5 + 3


def test_a_node_of_the_tanh_chain_takes_one_mebibyte() -> None:
    _, model, _, (inputs,) = build("tanh-chain")
    (offset,) = model.parameters()
    assert inputs.nbytes == offset.nbytes == 2**20


def test_a_dynamic_convolution_is_a_weighted_sum_around_each_token() -> None:
    torch.manual_seed(0)
    batch, length, heads, width, size = 2, 7, 3, 6, 5
    sequence = torch.randn(batch, length, width, dtype=torch.float64)
    kernels = torch.randn(batch, heads, length, size, dtype=torch.float64)
    for margin in [(2, 2), (4, 0)]:
        expected = torch.zeros_like(sequence)
        for token in range(length):
            for place in range(size):
                source = token + place - margin[0]
                if 0 <= source < length:
                    weight = kernels[:, :, token, place].repeat_interleave(width // heads, dim=1)
                    expected[:, token] += weight * sequence[:, source]
        torch.testing.assert_close(convolve(sequence, kernels, margin), expected)


def test_a_dynamic_convolution_with_one_kernel_is_a_depthwise_convolution() -> None:
    torch.manual_seed(0)
    sequence, kernel = torch.randn(2, 9, 4), torch.randn(3)
    expected = F.conv1d(sequence.transpose(1, 2), kernel.expand(4, 1, 3), padding=1, groups=4).transpose(1, 2)
    torch.testing.assert_close(convolve(sequence, kernel.expand(2, 2, 9, 3), (1, 1)), expected)


@pytest.mark.parametrize("causal", [False, True])
def test_plain_attention_agrees_with_the_one_of_torch(causal: bool) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 4, 6, 8).unbind()
    mask = None if causal else torch.rand(2, 1, 1, 6).gt(0.3).index_fill(-1, torch.tensor([0]), True)
    plain = attend(query, key, value, dropout=0.0, kind="plain", causal=causal, mask=mask)
    torch.testing.assert_close(plain, attend(query, key, value, dropout=0.0, causal=causal, mask=mask))


@pytest.mark.parametrize("attention", ["sdpa", "plain"])
def test_gpt_does_not_look_ahead(attention: str) -> None:
    _, model, _, (tokens, _) = build(f"{SMALL['gpt']},attention={attention}")
    assert_no_look_ahead(lambda changed: model.eval()(changed), tokens)


def test_the_translator_does_not_look_ahead_nor_at_padding() -> None:
    _, model, _, (source, target) = build(SMALL["dynamicconv"])
    assert_no_look_ahead(lambda changed: model.eval()(source, changed), target)
    longer = F.pad(source, (0, 3))
    torch.testing.assert_close(model(longer, target), model(source, target))


def assert_no_look_ahead(logits_of: Callable[[Tensor], Tensor], tokens: Tensor) -> None:
    changed = tokens.clone()
    changed[:, 5] = (changed[:, 5] + 1) % 32
    before, after = logits_of(tokens), logits_of(changed)
    torch.testing.assert_close(before[:, :5], after[:, :5])
    assert not torch.allclose(before[:, 5:], after[:, 5:])


def test_bert_does_not_look_at_padding() -> None:
    _, model, _, (batch,) = build(SMALL["bert"])
    padding = batch["mask"] == 0
    assert padding.any()
    before = model.eval()(batch["tokens"], batch["mask"])
    after = model(batch["tokens"].masked_fill(padding, 5), batch["mask"])
    torch.testing.assert_close(before[~padding], after[~padding])


def test_the_unrolled_cell_agrees_with_the_lstm_of_torch() -> None:
    torch.manual_seed(0)
    model, inputs = UnrolledCell(16, 8), torch.randn(4, 8, 16)
    reference = nn.LSTM(16, 16, batch_first=True)
    reference.load_state_dict({f"{name}_l0": weight for name, weight in model.cell.state_dict().items()})
    torch.testing.assert_close(torch.stack(model(inputs), dim=1), reference(inputs)[0])


def test_a_layer_of_the_deep_rnn_is_the_rnn_of_torch_and_a_residual() -> None:
    torch.manual_seed(0)
    layer, inputs = ResidualRecurrence(16), torch.randn(2, 6, 16)
    reference = nn.RNN(16, 16, batch_first=True)
    reference.load_state_dict(
        {
            "weight_ih_l0": layer.inputs.weight,
            "bias_ih_l0": layer.inputs.bias,
            "weight_hh_l0": layer.recurrence.weight,
            "bias_hh_l0": torch.zeros(16),
        }
    )
    torch.testing.assert_close(layer(inputs), inputs + reference(inputs)[0])


def test_the_unrolled_cell_can_have_its_loss_at_the_end() -> None:
    step, model, optimizer, (inputs, targets) = build(f"{SMALL['lstm-cell']},loss=end")
    expected = F.mse_loss(model(inputs)[-1], targets[:, 0])
    torch.testing.assert_close(step(model, optimizer, inputs, targets), expected)


def test_the_unrolled_cell_has_a_loss_at_each_time_step() -> None:
    step, model, optimizer, (inputs, targets) = build(SMALL["lstm-cell"])
    assert targets.shape == inputs.shape
    expected = F.mse_loss(torch.stack(model(inputs), dim=1), targets)
    torch.testing.assert_close(step(model, optimizer, inputs, targets), expected)


def test_the_catalog_describes_every_option() -> None:
    entries = catalog()
    assert [entry.name for entry in entries] == list(SMALL)
    for entry in entries:
        assert entry.summary.endswith(".")
        assert entry.summary.count(". ") <= 1
        assert "\n" not in entry.summary
        assert {"batch", "optimizer", "lr"} <= set(entry.options)
        for option in entry.options.values():
            assert str(option.type)
            assert option.meaning
            assert option.default is None or option.type.read(option.text) == option.default


def test_a_target_is_split_into_its_name_and_options() -> None:
    assert parse("gpt") == ("gpt", {})
    assert parse("resnet:stages=3-4-6-3,batch=2") == ("resnet", {"stages": (3, 4, 6, 3), "batch": 2})
    assert parse("gpt:dropout=0,attention=plain") == ("gpt", {"dropout": 0.0, "attention": "plain"})


@pytest.mark.parametrize(
    ("target", "message", "hint"),
    [
        ("resnett", "there is no built-in model 'resnett'; there are mlp, tanh-chain, resnet,", "resnet?"),
        ("zzz", "no built-in model 'zzz'", "lowtide models"),
        ("gpt:layer=2", "gpt has no option 'layer'; it has layers, width,", "did you mean layers?"),
        ("gpt:", "sets no option", "gpt:batch=2"),
        ("gpt:layers", "'layers' in 'gpt:layers' sets no option", "gpt:batch=2"),
        ("gpt:batch=2,batch=3", "gives batch twice", "keep one"),
        ("gpt:batch=0", "gpt: batch=0 is not a whole number of at least 1", "default, 4"),
        ("gpt:batch=abc", "gpt: batch=abc is not a whole number of at least 1", "default, 4"),
        ("gpt:dropout=1", "dropout=1 is not a number of at least 0 and below 1", "default, 0.1"),
        ("gpt:lr=nan", "lr=nan is not a number above 0", "leave lr out"),
        ("gpt:optimizer=adamv", "optimizer=adamv is not one of sgd, nesterov, adam,", "did you mean adam"),
        ("resnet:depth=51", "depth=51 is not one of 18, 34, 50, 101, 152, 200", "did you mean 50?"),
        ("resnet:stages=3-4-6", "stages=3-4-6 is not four whole numbers", "leave stages out"),
        ("resnet:size=16", "size=16 is too small", "size=32 or more"),
        ("resnet:size=32,batch=1", "BatchNorm needs two", "batch=2 or size=64"),
        ("unet:size=100", "it is no multiple of 16", "size=96 or size=112"),
        ("gpt:width=384,heads=7", "width=384 can't be divided among heads=7", "heads=6"),
        ("dynamicconv:width=511,heads=1", "width=511 is odd", "width=512"),
        ("bert:vocabulary=1", "a vocabulary of 1", "2 or more"),
    ],
)
def test_a_wrong_target_says_what_there_is_and_what_to_do(target: str, message: str, hint: str) -> None:
    with pytest.raises(UsageError) as caught:
        build(target)
    assert message in str(caught.value)
    assert caught.value.hint is not None
    assert hint in caught.value.hint


def test_importing_the_models_does_not_import_transformers() -> None:
    code = "import sys, lowtide.models; sys.exit('transformers' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
