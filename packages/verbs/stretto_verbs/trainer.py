"""`stretto.Trainer`: training a policy in this process, one gradient and one optimizer step at a time."""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from stretto.core.errors import DataError, Problem, RecipeError, RunFolderError, described
from stretto.core.records import Batch
from stretto.loop.config import DeadlinesConfig
from stretto.model.hf.folder import save_policy, saved_dtype, whole_folder
from stretto.model.hf.tokenizer import Tokenizer, load_tokenizer
from stretto.model.kernels import TRAINING, use_onednn
from stretto.store import lock
from stretto.store.checkpoints import Checkpoints
from stretto.trainer import adapters, checkpoint
from stretto.trainer.batch.minibatch import Minibatch, minibatch
from stretto.trainer.batch.samples import NO_SCORES, Sample, chosen_of, samples_of, scored_of
from stretto.trainer.config import OptimizerConfig
from stretto.trainer.gradients import Gradient, Gradients, gradient_of, set_gradient, whole_gradient
from stretto.trainer.metrics import Meter
from stretto.trainer.objective.algorithm import AlgorithmConfig
from stretto.trainer.optimizer import AdamNumbers, Learner, OptimizerStep
from stretto.trainer.ranks import ALONE
from stretto.trainer.reference import Reference, ReferencePolicy, WithoutAdapters
from stretto_verbs import models
from stretto_verbs.arguments import FOLDER, ArgumentKind, check, checked, instance, optimizer_of, sampling_of
from stretto_verbs.completion import mark_of
from stretto_verbs.datum import (
    Data,
    Forward,
    check_batch,
    check_data,
    check_sampled,
    datum_of,
    listed,
    rewards_of,
    sample_of,
)
from stretto_verbs.loss import (
    CROSS_ENTROPY,
    Loss,
    Wanted,
    as_likelihood,
    by_sample,
    check_data_settings,
    check_own,
    columns_of,
    own_gradient,
    wanted,
)
from stretto_verbs.models import MODEL, Lora, PolicyWeights, SharedModel, check_targets, lora_of, trainable
from stretto_verbs.small_model import replacing
from stretto_verbs.trainer_apart import TrainerApart

_LOSS = ArgumentKind(
    "the name of a loss, a dict with its kind and numbers, or a function",
    lambda given: given is None or isinstance(given, str | Mapping) or callable(given),
)
_FORWARD = instance(Forward, "what `forward` returned for the same data").or_none
_CHECKPOINTS = "checkpoints"  # sub-folder of the given one, as in a run folder


class LocalTrainer:
    """Trains the policy of a model folder: computes losses and gradients, and takes optimizer steps.

    Example::

        # Two steps towards a completion, the policy for an engine, and all of it on disk.
        trainer = stretto.Trainer("model", lora=8, learning_rate=1e-3)
        told = [stretto.Datum.of((2, 3, 4), (5, 1))]
        for _ in range(2):
            print(trainer.forward_backward(told, "cross_entropy").loss)
            trainer.optim_step()
        stretto.Engine.load("model").update(trainer.weights())
        trainer.save("checkpoints")

    `version` numbers the policies that leave the trainer. It is 0 at first. It grows by one with the very first step,
    and with the first step after each `weights`, `save` or `load`. A step that is skipped counts too. `load` sets it to
    the checkpoint's.
    """

    def __init__(
        self,
        model: str | Path | SharedModel,
        *,
        lora: Lora = None,
        sampling: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> None:
        """Load the policy, as version 0, with a new optimizer.

        Args:
            model: a Hugging Face folder, or a `stretto.SharedModel`: one model in memory that several trainers share
                (needs `lora`).
            lora: rank of the adapters that are trained in place of the parameters, or a dict with `rank`, `alpha` and
                `target_modules`; None: all parameters are trained.
            sampling: `temperature`, `top_p`, `top_k`, `min_p` and `max_tokens` with which the completions were sampled,
                if they differ from the defaults of `Engine.sample`.
            **settings: keys of a recipe's section ``[trainer]``, such as `learning_rate`; `threads` sets torch's
                threads of this whole process.

        Raises:
            ModelFolderError: the folder cannot be loaded, or its model cannot be trained.
            RecipeError: a setting is invalid, or only recipes have it (`warmup_steps`, `schedule`).
        """
        check("Trainer", model=(model, MODEL))
        self._settings = optimizer_of(settings, "Trainer")
        self._lora = lora_of(lora, "Trainer: lora")
        self._sampling = sampling_of(sampling)
        if "threads" in settings:
            torch.set_num_threads(self._settings.threads)
        trained: Any
        if isinstance(model, SharedModel):
            if self._lora is None:
                remedy = "give lora=16, or the folder of the model"
                raise RecipeError([Problem("Trainer: lora", "is missing: a shared model is never changed", remedy)])
            self._folder, trained = model.folder, model.view(self._lora)
            self.tokenizer: Tokenizer = model.tokenizer
        else:
            self._folder = Path(model).expanduser()
            trained = self._load(self._folder)
            self.tokenizer = load_tokenizer(self._folder)
            if self._lora is not None:
                check_targets(trained, self._lora, "Trainer: lora")
                adapters.adapt(trained, self._lora)
        self._learner = Learner(trained, self._settings, self._sampling)
        self._adapted = adapters.adapted_layers(trained)
        self._base = models.base_marks(self._folder) if self._adapted else {}
        text = trained.config.get_text_config()
        self._vocabulary: int = trained.get_input_embeddings().weight.shape[0]
        self._longest: int = text.max_position_embeddings
        self._published, self._stepped, self._asked = 0, False, False
        self._references: dict[str, Reference] = {}
        self._held: dict[Path, int] = {}
        self._mark = mark_of(self.tokenizer)
        weakref.finalize(self, _release, self._held)

    @classmethod
    def apart(
        cls,
        model: str | Path,
        *,
        lora: Lora = None,
        sampling: Mapping[str, Any] | None = None,
        deadlines: Mapping[str, Any] | None = None,
        **settings: Any,
    ) -> TrainerApart:
        """Start a trainer with the same methods in a process of its own. Other arguments are those of `Trainer`.

        Args:
            deadlines: keys of a recipe's section ``[deadlines]``: `start`, `hung`; None: the defaults.

        Raises:
            ModelFolderError, RecipeError: as for a trainer in this process.
            RoleError: the process did not start.
        """
        check("Trainer.apart", model=(model, MODEL))
        config = optimizer_of(settings, "Trainer.apart")
        waits = checked(deadlines or {}, "Trainer.apart: deadlines", DeadlinesConfig)
        if isinstance(model, SharedModel):
            told, remedy = "a model in the memory of this process", "give its folder"
            raise RecipeError([Problem("Trainer.apart: model", told, remedy)])
        threads = config.threads if "threads" in settings else torch.get_num_threads()
        given = {**settings, "lora": lora, "sampling": sampling}
        return TrainerApart(Path(model).expanduser().absolute(), given, threads, waits)

    def _load(self, folder: Path) -> Any:
        """Load a model for training, with the fastest kernels."""
        model = trainable(folder, self._settings.device)
        use_onednn(model, TRAINING)
        return model

    @property
    def version(self) -> int:
        """Version of the current policy: one more after the first step since creation, `weights`, `save` or `load`."""
        return self._published + self._stepped

    @property
    def gradient(self) -> Gradient:
        """The gradient that `optim_step` will use: for each trained parameter, in the model's order, its tensor (not a
        copy), or None while no loss was added. Can be set to such a list."""
        return gradient_of(self._learner.model)

    @gradient.setter
    def gradient(self, gradient: Gradient) -> None:
        set_gradient(self._learner.model, gradient)

    # ── gradients ────────────────────────────────────────────────────────────────────────────────

    def forward(self, data: Data) -> Forward:
        """Compute the log-probabilities of the data under the current policy. Changes nothing.

        Raises:
            DataError: the data do not fit the model, or belong to a later version than this trainer's.
        """
        algorithm, data = AlgorithmConfig(), listed(data, "forward")
        samples = self._samples(data, Wanted("forward", algorithm, "sum"), "forward", sampled=False)
        part = self._part(samples, "sum")
        return self._forward(part, samples, Gradients(self._learner, algorithm).evaluated(part))

    def forward_backward(
        self, data: Data, loss: Loss | None = None, *, proximal: Forward | None = None, **algorithm: Any
    ) -> Forward:
        """Add the gradient of a loss over the data to `gradient`; returns the loss, its metrics and the
        log-probabilities. A call that fails or is interrupted adds nothing.

        Args:
            data: a batch of `Scheduler.take`, or a list of `Datum`.
            loss: "cross_entropy"; the name of a loss of recipes (docs/explanation/algorithm.md), or a dict with its
                `kind` and numbers; or a function. The function is called with (log-probabilities of each sequence,
                sequences as `Datum`s, also for a batch) and returns the loss, or the loss and a dict of metrics.
                Default: "decoupled_ppo" for a batch, "cross_entropy" for a list.
            proximal: result of `forward` before the first of several steps over the same data, for losses that compare
                with the proximal policy; default: the current policy.
            **algorithm: further keys of a recipe's section ``[algorithm]``: `advantages`, `correction`, `aggregation`
                (also "sum"), `reference`, `entropy_bonus`, `shaping`.

        Raises:
            DataError: the data do not fit the model, lack numbers that the loss needs, or belong to a later version
                than this trainer's.
            RecipeError: the loss does not exist, or a setting is invalid.
        """
        place = "forward_backward"
        check(place, loss=(loss, _LOSS), proximal=(proximal, _FORWARD))
        data = listed(data, place)
        if not isinstance(data, Batch):
            check_data_settings(algorithm, place)
        usual = "decoupled_ppo" if isinstance(data, Batch) else CROSS_ENTROPY
        chosen = wanted(usual if loss is None else loss, algorithm, place)
        samples, seen = self._samples(data, chosen, place, sampled=chosen.sampled), cast(Any, data)
        if not samples:
            self._asked = True  # until the next step
            return Forward((), 0.0, {"tokens": 0.0} | rewards_of(data))
        if chosen.own is not None:
            check_own(chosen, proximal, place)
            if isinstance(data, Batch):
                seen = tuple(datum_of(one) for one in samples)
                pairs = zip(seen, samples, strict=True)
                samples = [replace(sample_of(one, 0, sampled=False), id=sample.id) for one, sample in pairs]
        part = self._part(samples, chosen.aggregation)
        if chosen.own is not None:
            with whole_gradient(self._learner.model):
                value, metrics, found = own_gradient(self._learner, part, samples, seen, chosen, place)
            return Forward(columns_of(found), value, metrics | rewards_of(data), tuple(sample.id for sample in samples))
        gradients = Gradients(self._learner, chosen.algorithm, self._reference(chosen.algorithm))
        before = None if proximal is None else self._proximal(part, samples, proximal, place)
        meter = Meter()
        with whole_gradient(self._learner.model):
            columns = gradients.accumulate(part, meter, first=before is None, proximal=before)
        metrics = meter.metrics(ALONE)
        measured = metrics if chosen.sampled else {name: metrics[name] for name in ("entropy",) if name in metrics}
        measured = {name: value for name, value in measured.items() if name != "bad_steps"} | rewards_of(data)
        value = metrics.get("loss", math.nan) if part.loss_tokens else 0.0
        return self._forward(part, samples, columns, value, {**measured, "tokens": float(part.loss_tokens)})

    def optim_step(
        self,
        learning_rate: float | None = None,
        *,
        beta1: float | None = None,
        beta2: float | None = None,
        eps: float | None = None,
        weight_decay: float | None = None,
        max_grad_norm: float | None = None,
    ) -> OptimizerStep:
        """Take a step of AdamW with the accumulated gradient, and clear the gradient. Returns the gradient's norm
        before clipping, and whether the step was taken.

        Arguments other than None replace the trainer's settings for this step; a `max_grad_norm` of infinity disables
        clipping. The step is skipped if the gradient is not finite, or the batch had no token that is trained on.

        Raises:
            DataError: there is no gradient.
            RecipeError: a number is out of range.
            TrainingDiverged: `max_bad_steps` steps in a row were skipped.
        """
        unclipped = max_grad_norm == math.inf
        given = {"learning_rate": learning_rate, "beta1": beta1, "beta2": beta2, "eps": eps}
        given |= {"weight_decay": weight_decay, "max_grad_norm": None if unclipped else max_grad_norm}
        changed = {name: value for name, value in given.items() if value is not None}
        now = checked(self._settings.model_dump() | changed, "optim_step", OptimizerConfig)
        numbers = AdamNumbers.of(now)
        if unclipped:
            numbers = replace(numbers, max_grad_norm=math.inf)
        empty = all(one is None for one in self.gradient)
        if empty and not self._asked:
            raise DataError([Problem("optim_step", "there is no gradient", "call forward_backward before it")])
        step = OptimizerStep(0.0, False) if empty else self._learner.step(now.learning_rate, self.version, numbers)
        self._stepped, self._asked = True, False
        return step

    # ── the policy ───────────────────────────────────────────────────────────────────────────────

    def weights(self) -> PolicyWeights:
        """Copy the current weights, with the present version, for `Engine.update`; with `lora`, the adapters only."""
        self._published, self._stepped = self.version, False
        model = self._learner.model
        named = adapters.adapter_parameters(model) if self._adapted else model.named_parameters()
        tensors = {name: adapters.scaled(self._adapted, name, one.detach()).clone() for name, one in named}
        return PolicyWeights(self._published, tensors, self._mark, self._base)

    def save(self, folder: str | Path) -> Path:
        """Save a checkpoint: the policy, or its adapters, and the state of the optimizer. Returns its folder.

        The checkpoint is written completely or not at all, with checksums, into a sub-folder of `folder`. The two
        newest are kept. `folder` is locked: until `close`, no other trainer can save there.

        Raises:
            RunFolderError: another trainer saves there, the folder holds a newer version, or it cannot be created.
            StoreError: the checkpoint cannot be written: the disk is full.
        """
        check("save", folder=(folder, FOLDER))
        self._published, self._stepped = self.version, False
        place = Path(folder).expanduser() / _CHECKPOINTS
        self._hold(place)
        saved, state = Checkpoints(place), checkpoint.TrainerState.of(self._learner, self._published)
        saved.continue_at(self._published)
        return saved.save(self._published, models.with_base(state.write, self._base))

    def load(self, folder: str | Path, *, optimizer: bool = True) -> int:
        """Load the newest complete checkpoint that `save` has written to `folder`, or that a run folder has; returns
        its version. The accumulated gradient is cleared.

        Args:
            optimizer: also load the state of the optimizer; False: start with a new one.

        Raises:
            RunFolderError: nothing was saved there, or the folder cannot be read.
            StoreError: no checkpoint is complete, or it belongs to another model or to other adapters.
        """
        check("load", folder=(folder, FOLDER))
        saved = Checkpoints(place := Path(folder).expanduser() / _CHECKPOINTS)
        try:
            saved.take_back(locked=Path(os.path.realpath(place)) in self._held)
            found = saved.latest()
        except OSError as error:
            raise RunFolderError([Problem(str(folder), f"cannot be read: {described(error)}")]) from error
        if found is None:
            told = "holds nothing that a trainer has saved", "give a folder that `save` has written"
            raise RunFolderError([Problem(str(folder), *told)])
        models.check_base_of(found.path, self._base)
        self._published = checkpoint.load(found.path, self._learner)
        self._stepped = self._asked = False
        self._learner.adamw.zero_grad(set_to_none=True)
        if not optimizer:
            self._learner.adamw.state.clear()
        return self._published

    def export(self, folder: str | Path, *, adapters_only: bool = False) -> None:
        """Write the policy as a Hugging Face folder. Adapters are merged into the weights, and also written for peft,
        to the sub-folder ``adapter``.

        Args:
            adapters_only: write only the adapters, to `folder` itself.

        Raises:
            RecipeError: `adapters_only`, and the trainer has no adapters.
            ModelFolderError: `folder` holds anything else than an unchanged result of `export`, or cannot be written.
        """
        check("export", folder=(folder, FOLDER))
        if adapters_only and self._lora is None:
            told = "this trainer has none"
            raise RecipeError([Problem("export: adapters_only", told, "leave it out, or make it with lora=16")])
        place = Path(folder).expanduser()
        with replacing(place, "export"):
            self._write(place, adapters_only=adapters_only)

    def _write(self, place: Path, *, adapters_only: bool) -> None:
        """Write what `export` writes, the policy and its adapters or these alone, to a folder that may be replaced."""
        model = self._learner.model
        if self._lora is not None and adapters_only:
            with whole_folder(place) as partial:
                adapters.gather_adapters(model, self._lora, ALONE, "")(partial)
            return
        dtype = saved_dtype(self._settings.save_dtype, self._folder)
        if self._lora is None:
            save_policy(model, self._folder, place, dtype=dtype)
            return
        parameters = ((name, self._merged(name, one)) for name, one in adapters.plain_parameters(model))
        add = adapters.gather_adapters(model, self._lora, ALONE)
        save_policy(model, self._folder, place, parameters, add, dtype)

    def close(self) -> None:
        """Release the locks of the folders that this trainer has saved to."""
        _release(self._held)  # the finalizer stays: a later `save` locks its folder again

    # ── inside ───────────────────────────────────────────────────────────────────────────────────

    def _merged(self, name: str, parameter: Tensor) -> Tensor:
        """Return the parameter with its adapters added to it; the parameter itself if it has none."""
        layer = self._adapted.get(name.removesuffix(".weight"))
        if layer is None or not name.endswith(".weight"):
            return parameter.detach()
        return adapters.merged(layer, parameter.detach(), ALONE)

    def _hold(self, folder: Path) -> None:
        """Create and lock a folder until `close`, unless this trainer has it. RunFolderError if either fails."""
        key = Path(os.path.realpath(folder))
        if key in self._held:
            return
        try:
            key.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found = f"cannot be created: {error.strerror}"
            raise RunFolderError([Problem(str(folder), found, "give another folder")]) from error
        self._held[key] = lock.acquire(key)

    def _samples(self, data: Data, loss: Wanted, place: str, *, sampled: bool) -> list[Sample]:
        """Check the data and convert them for the model. `sampled`: a list must have log-probabilities and advantages;
        `place`: name of the called method, for messages. Raises DataError if the data cannot be trained on."""
        if isinstance(data, Batch):
            return self._of_batch(data, loss, place)
        check_data(data, self._vocabulary, self._longest, place)
        if sampled:
            check_sampled(data, loss.name, place)
        return [sample_of(one, number, sampled=sampled, longest=self._longest) for number, one in enumerate(data)]

    def _of_batch(self, batch: Batch, loss: Wanted, place: str) -> list[Sample]:
        check_batch(batch, self.version, self._vocabulary, self._mark, place)
        reference = self._reference(loss.algorithm) if loss.algorithm.divergence("reward") is not None else None
        known = NO_SCORES if reference is None else reference.token_logprobs(batch)
        found = samples_of(batch, loss.algorithm, self._sampling.max_tokens, reference_logprobs=known)
        return as_likelihood(found.samples) if loss.likelihood else list(found.samples)

    def _part(self, samples: Sequence[Sample], aggregation: Any) -> Minibatch:
        return minibatch(samples, self._settings, aggregation, self._sampling.max_tokens, self._learner.model.device)

    def _forward(
        self,
        part: Minibatch,
        samples: Sequence[Sample],
        found: Sequence[Tensor],
        loss: float = math.nan,
        metrics: Mapping[str, float] | None = None,
    ) -> Forward:
        columns = by_sample(part, {sample.id: sample for sample in samples}, found)
        ids = tuple(sample.id for sample in samples)
        return Forward(columns_of([columns[id] for id in ids]), loss, metrics or {}, ids)

    def _proximal(self, part: Minibatch, samples: Sequence[Sample], proximal: Forward, place: str) -> list[Tensor]:
        """Log-probabilities of `proximal` for the loss tokens of each micro-batch; DataError if it is of other data."""
        known = dict(zip(proximal.ids, proximal.logprobs, strict=True))
        by_id = {sample.id: sample for sample in samples}
        if wrong := [id for id, one in by_id.items() if len(known.get(id, ())) != len(scored_of(one))]:
            told = f"has no log-probabilities of sequence {wrong[0]}"
            raise DataError([Problem(f"{place}: proximal", told, "give what `forward` returned for the same data")])
        device = self._learner.model.device
        return [
            torch.tensor([known[id][at] for id in micro.ids for at in chosen_of(by_id[id])], device=device)
            for micro in part.micro_batches
        ]

    def _reference(self, algorithm: AlgorithmConfig) -> Reference | None:
        """Return the reference policy of `algorithm.reference.path`, loaded at the first call; without a path, the
        initial policy. None: the algorithm has no reference."""
        if algorithm.reference is None:
            return None
        path = algorithm.reference.path
        if path is None and self._adapted:
            return WithoutAdapters(self._learner)
        folder = str(Path(path).expanduser() if path is not None else self._folder)
        if folder not in self._references:
            model = self._load(Path(folder))
            self._references[folder] = ReferencePolicy(model, self._settings, self._sampling)
        return self._references[folder]


def _release(held: dict[Path, int]) -> None:
    """Close the descriptors of locks, by folder, and empty `held`."""
    while held:
        os.close(held.popitem()[1])
