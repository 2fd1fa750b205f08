"""Loops of frameworks, on the real libraries: the same losses and weights with lowtide as without."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from twins import assert_same

import lowtide

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
QUICK: dict[str, Any] = {"costs": "roofline", "time_limit": 0.3}

pytestmark = [
    pytest.mark.filterwarnings("default"),  # those of the frameworks are theirs
    pytest.mark.filterwarnings("error::lowtide.LowtideWarning"),
]


@pytest.mark.parametrize("name", sorted(path.stem for path in EXAMPLES.glob("*.py")))
def test_examples_have_the_losses_of_the_same_run_without_lowtide(name: str) -> None:
    specification = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    assert specification is not None
    assert specification.loader is not None
    example = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(example)
    plain = example.train()
    assert len(plain) >= 4
    quick = {"time_limit": 0.3} if name == "several_ranks" else QUICK  # a whole step keeps its budget, or warns
    assert example.train("75%", **quick) == plain


# ------------------------------------------------------------------------------------------------------- Hugging Face


class Tokens(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        tokens = (torch.arange(12) * (place + 1) + place) % 64
        return {"input_ids": tokens, "labels": tokens}


def hugging_face(folder: Path, callbacks: list[Any], *, lora: bool = False, half: bool = False, **options: Any) -> Any:
    """A trainer after its training, with some seed."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

    resume = options.pop("resume", None)
    set_seed(0)
    model: Any = GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=2, vocab_size=64, n_positions=16))
    if half:
        model = model.bfloat16()
    if lora:
        from peft import LoraConfig, get_peft_model

        adapters = LoraConfig(r=4, target_modules=["c_attn"], task_type="CAUSAL_LM", fan_in_fan_out=True)
        model = get_peft_model(model, adapters)
    given = {"max_steps": 4, "per_device_train_batch_size": 4, "save_steps": 2, "logging_steps": 1, **options}
    arguments = TrainingArguments(
        str(folder), use_cpu=True, report_to=[], disable_tqdm=True, learning_rate=1e-3, **given
    )
    trainer = Trainer(model, arguments, train_dataset=Tokens(), eval_dataset=Tokens(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return trainer


def losses(trainer: Any) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history for key in ("loss", "eval_loss") if key in entry]


def assert_alike(plain: Any, found: Any, callback: Any) -> None:
    assert losses(found) == losses(plain)
    assert_same(dict(plain.model.state_dict()), dict(found.model.state_dict()))
    assert callback.attached.calls["by a plan"] >= 2
    assert "_lowtide" not in vars(found.model)


TRAINERS: dict[str, dict[str, Any]] = {
    "accumulated": {"gradient_accumulation_steps": 2, "max_grad_norm": 0.1, "eval_strategy": "steps", "eval_steps": 2},
    "smoothed": {"label_smoothing_factor": 0.1},
    "mixed": {"bf16": True},
    "half": {"half": True},
    "checkpointed": {"gradient_checkpointing": True},
    "lora": {"lora": True},
}


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINERS)
def test_the_trainer_of_hugging_face(name: str, tmp_path: Path) -> None:
    budget = None if name in ("mixed", "half") else "90%"  # what ops of 16 bits hold inside is not known here
    callback = lowtide.TrainerCallback(budget, **QUICK)
    plain = hugging_face(tmp_path / "plain", [], **TRAINERS[name])
    found = hugging_face(tmp_path / "found", [callback], **TRAINERS[name])
    assert_alike(plain, found, callback)


@pytest.mark.long
def test_what_the_trainer_saves_is_the_plain_model_and_resumes(tmp_path: Path) -> None:
    from transformers import GPT2LMHeadModel

    callback = lowtide.TrainerCallback("90%", **QUICK)
    plain = hugging_face(tmp_path / "plain", [])
    found = hugging_face(tmp_path / "found", [lowtide.TrainerCallback("90%", **QUICK)])
    resumed = hugging_face(tmp_path / "found", [callback], resume=str(tmp_path / "found" / "checkpoint-2"))
    assert_alike(plain, resumed, callback)
    found.model.save_pretrained(tmp_path / "saved")
    loaded = GPT2LMHeadModel.from_pretrained(tmp_path / "saved")
    assert_same(dict(plain.model.state_dict()), dict(loaded.state_dict()))


# ----------------------------------------------------------------------------------------------------------- Accelerate


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 32), nn.BatchNorm1d(32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 16))


@pytest.mark.parametrize("first", [False, True], ids=["prepared-first", "attached-first"])
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_accelerate(precision: str, first: bool) -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    found: list[dict[str, Any]] = []
    budget = "90%" if precision == "no" else None  # what products of 16 bits hold inside is not known here
    for planned in (False, True):
        AcceleratorState._reset_state(True)
        accelerator = Accelerator(cpu=True, mixed_precision=precision, gradient_accumulation_steps=2)
        model = net()
        if planned and first:
            lowtide.attach(model, budget, **QUICK)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader = DataLoader(TensorDataset(torch.randn(96, 16)), batch_size=16)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        if planned and not first:
            lowtide.attach(model, budget, optimizer, **QUICK)
        seen: dict[str, Any] = {}
        for number, (x,) in enumerate(loader):
            with accelerator.accumulate(model):
                loss = F.mse_loss(model(x), x.flip(1))
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            seen[f"loss {number}"] = loss.detach()
        attached = vars(model).get("_lowtide")
        assert (attached is not None) == planned
        assert attached is None or attached.calls["by a plan"] == 6
        plain = accelerator.unwrap_model(model)
        found.append({**seen, **{name: one.clone() for name, one in plain.state_dict().items()}})
    AcceleratorState._reset_state(True)
    assert_same(*found)


# ------------------------------------------------------------------------------------------------------------ Lightning


def lightning_module(forward: bool) -> Any:
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()
            self.seen: dict[str, Any] = {}
            if forward:
                self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = self.net(x)
            return out * self.scale if forward else out

        def training_step(self, batch: list[Tensor], number: int) -> Tensor:
            (x,) = batch
            loss = F.mse_loss(self(x) if forward else self.net(x), x.flip(1))
            self.log("loss", loss)
            self.seen[f"loss {number}"] = loss.detach()
            return loss

        def validation_step(self, batch: list[Tensor], number: int) -> None:
            (x,) = batch
            self.seen[f"validated {number}"] = F.mse_loss(self(x), x.flip(1))

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-2)

    return Module()


def fit_by_lightning(module: Any, callbacks: list[Any], folder: Path, **options: Any) -> dict[str, Any]:
    import lightning

    data = torch.randn(96, 16, generator=torch.Generator().manual_seed(1))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=folder, gradient_clip_val=0.5, callbacks=callbacks, **options,
    )  # fmt: skip
    loaders = [DataLoader(TensorDataset(data), batch_size=16) for _ in range(2)]
    torch.manual_seed(2)
    trainer.fit(module, *loaders)
    return {**module.seen, **{name: one.clone() for name, one in module.state_dict().items()}}


@pytest.mark.parametrize("forward", [False, True], ids=["a-net-in-it", "its-own-forward"])
@pytest.mark.parametrize(
    "options",
    [{}, pytest.param({"precision": "bf16-mixed", "accumulate_grad_batches": 2}, marks=pytest.mark.long)],
    ids=["plain", "mixed"],
)
def test_lightning(forward: bool, options: dict[str, Any], tmp_path: Path) -> None:
    callback = lowtide.LightningCallback(None if options else "90%", **QUICK)
    plain = fit_by_lightning(lightning_module(forward), [], tmp_path / "plain", **options)
    module = lightning_module(forward)
    found = fit_by_lightning(module, [callback], tmp_path / "found", **options)
    assert_same(plain, found)
    assert callback.attached.calls["by a plan"] == 6
    assert "_lowtide" not in vars(module.net)


def test_lightning_with_a_net_that_decides_by_its_data(tmp_path: Path) -> None:
    found = []
    callback = lowtide.LightningCallback("least", fallback="modules", **QUICK)
    for callbacks in ([], [callback]):
        module = lightning_module(False)
        inner = nn.Sequential(*module.net)
        module.net = nn.Sequential(inner)
        module.net.forward = lambda x, inner=inner: inner(x) if x.sum() < 0 else inner(x).tanh()
        said = "1 parts go by plans of their own: 0\n"
        with pytest.warns(lowtide.LowtideWarning, match=said) if callbacks else nullcontext():
            found.append(fit_by_lightning(module, callbacks, tmp_path / str(len(callbacks))))
    assert_same(*found)
    assert callback.attached.calls["by its parts"] == 6


def test_lightning_says_where_nothing_is_planned(tmp_path: Path) -> None:
    callback = lowtide.LightningCallback("90%", module="net.1", **QUICK)
    module = lightning_module(False)
    module.net.forward = lambda x, parts=module.net: parts[4](parts[0](x))
    with pytest.raises(lowtide.UsageError, match=r"did not call the forward of net\.1[\s\S]*module="):
        fit_by_lightning(module, [callback], tmp_path)
    assert "_lowtide" not in vars(module.net[1])


def test_what_is_not_installed_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    from lowtide import frameworks

    def missing(name: str) -> Callable[..., Any]:
        raise ModuleNotFoundError("no", name="lightning")

    monkeypatch.setattr(frameworks, "import_module", missing)
    with pytest.raises(lowtide.UsageError, match=r"needs lightning, which is not installed[\s\S]*pip install"):
        _ = lowtide.LightningCallback
