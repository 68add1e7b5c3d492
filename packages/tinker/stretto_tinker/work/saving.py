"""Requests that save checkpoints: to train further, to sample from, or for other programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import msgspec

from stretto.core.errors import RefusedRequest
from stretto_tinker.checkpoints import EXTERNAL, SAMPLER, TRAINING, Place, Weights, checked_name
from stretto_tinker.dates import now
from stretto_tinker.record import Asked, CheckpointRow, Record, SamplerRow
from stretto_tinker.wire.bodies import SaveWeights, parse
from stretto_tinker.work.models import Live

SAVE, SAVE_FOR_SAMPLER, SAVE_EXTERNAL = "save_weights", "save_weights_for_sampler", "save_weights_external"
_KINDS = {SAVE: TRAINING, SAVE_FOR_SAMPLER: SAMPLER, SAVE_EXTERNAL: EXTERNAL}
SAVES = frozenset(_KINDS)
_KEPT = ("snapshot", "inflight")  # weights without a name: a sampler keeps them, or follows the model's newest
_UNNAMED = "unnamed-"
_OPTIMIZER = "optimizer.*"


class Saving:
    """Computes requests that save checkpoints."""

    def __init__(self, record: Record, weights: Weights) -> None:
        self._record, self._weights = record, weights

    def save(self, live: Live, asked: Asked) -> tuple[list[Place], bytes]:
        """Write a checkpoint of a model and record it, for the request `asked`, which must have its body. Weights
        without a name get a sampling session; if they are in-flight, older in-flight weights of the model are deleted.
        Returns the places that were written or deleted, and the encoded result.

        Raises:
            RefusedRequest: the name is invalid, missing or taken, or an option is not served.
            OSError: the files cannot be written; none are left.
        """
        body = parse(asked.body or b"", SaveWeights)
        kind = _KINDS[asked.kind]
        unnamed = body.path is None
        if unnamed and asked.kind != SAVE_FOR_SAMPLER:
            raise RefusedRequest("path", "missing", "a name")
        place = Place(asked.lane, kind, f"{_UNNAMED}{asked.seq}" if body.path is None else checked_name(body.path))
        self._check(place, body, asked)
        size = self._weights.write(self._weights.folder(place), _written(live, kind))
        expires = None if body.ttl_seconds is None else now() + body.ttl_seconds
        inflight = unnamed and body.kind == "inflight"
        described = msgspec.json.encode({"user_metadata": body.user_metadata, "unnamed": unnamed, "inflight": inflight})
        row = CheckpointRow(
            place.path, place.model, asked.owner, kind, place.name, now(), size, False, expires, asked.id, described
        )
        with self._record.together():
            self._record.add_checkpoint(row)
            if not unnamed:
                return [place], msgspec.json.encode({"path": place.path, "size_bytes": size, "type": asked.kind})
            sampler = self._open(body, place, asked)
            outdated = self._outdated(asked.lane) if inflight else []
            for one in outdated:
                self._record.drop_checkpoint(one.path)
        for one in outdated:
            self._weights.drop(self._weights.folder(one))
        return [place, *outdated], msgspec.json.encode({"sampling_session_id": sampler, "type": asked.kind})

    def _outdated(self, model: str) -> list[Place]:
        """Places of in-flight weights of a model that can be deleted: all but the newest two. Empty while a sampler
        that follows the model has a queued request."""
        if self._record.followers_wait(model):
            return []
        rows = [row for row in self._record.checkpoints(model=model) if msgspec.json.decode(row.body).get("inflight")]
        return [Place.of(row.path) for row in rows[2:]]

    def _check(self, place: Place, body: SaveWeights, asked: Asked) -> None:
        """Raise RefusedRequest if another request has saved this name (without `overwrite`), or an option is not
        served."""
        held = self._record.checkpoint(place.path)
        if held is not None and held.request != asked.id and not body.overwrite:
            told = f"{place.path} is there already"
            raise RefusedRequest("path", told, "another name, or overwrite")
        if body.kind not in _KEPT:
            raise RefusedRequest("kind", f"{body.kind!r:.40} is not served", " or ".join(_KEPT))
        if body.age_encryption_recipients:
            told = "encryption (age) is not served: this server is the client's own"
            raise RefusedRequest("age_encryption_recipients", told, "none")

    def _open(self, body: SaveWeights, place: Place, asked: Asked) -> str:
        """Open the sampling session for weights without a name, or set new weights for one that follows the model;
        returns its id. RefusedRequest if its number is missing or taken."""
        session = asked.lane.partition(":")[0]
        if body.sampling_session_seq_id is None:
            raise RefusedRequest("sampling_session_seq_id", "missing", "a number, where there is no path")
        sampler = sampler_id(session, body.sampling_session_seq_id)
        follows = asked.lane if body.kind == "inflight" else None
        row = SamplerRow(sampler, session, asked.owner, now(), place.path, follows)
        self._record.add_sampler(row)
        held = self._record.sampler(sampler)
        assert held is not None
        if held.model != follows or (follows is None and held.path != place.path):
            told = f"{body.sampling_session_seq_id} is another sampler already"
            raise RefusedRequest("sampling_session_seq_id", told, "a number of its own")
        if follows is not None:
            self._record.follow(follows, place.path)
        return sampler


def sampler_id(session: str, seq: int) -> str:
    """Id of a sampling session, made of its session's id and its number there (`seq`), so that a retry of the request
    that opens it gets the same id."""
    return f"{session}:sample:{seq}"


def _written(live: Live, kind: str) -> Callable[[Path], None]:
    """Make the function that writes a model into a folder; the optimizer state is left out unless `kind` is for
    training."""

    def write(folder: Path) -> None:
        live.model.save(folder)
        if kind != TRAINING:
            for file in folder.glob(_OPTIMIZER):
                file.unlink()

    return write
