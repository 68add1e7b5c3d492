"""Every trajectory of a run as one line of JSON, for tools of all kinds."""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import accumulate, pairwise
from pathlib import Path

import msgspec

from stretto.core.errors import Problem, RunFolderError
from stretto.core.records import Record, Segment, trajectory_id
from stretto.store.folder.run_folder import RunFolder
from stretto.store.ledger.rows import Payload, decode_payload
from stretto.store.ledger.schema import reading
from stretto.store.ledger.seals import check_rows
from stretto.store.series.lines import read_lines

_ROWS = """
    SELECT groups.id, prompt_id, member, prompt_token_ids, payload, interrupted, reward, verdict, state, reason,
           admitted_version, trained_step, stop_reason
    FROM trajectories JOIN groups ON groups.key = group_key LEFT JOIN payloads USING (key)
    ORDER BY trajectories.key
"""
_NOTHING = Payload(segments=(), text="")


class ExportedTrajectory(Record, frozen=True):
    """One line. Log-probabilities and versions are those of the sampled tokens; `given` has the spans of `token_ids`
    that were not sampled. Token fields are empty if nothing was sampled, or if ``store.keep_payloads`` kept none."""

    id: str
    group: str
    prompt_id: str
    prompt_token_ids: tuple[int, ...]
    token_ids: tuple[int, ...]
    behavior_logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    given: tuple[tuple[int, int], ...]
    reward: float | None
    verdict: str | None
    state: str
    reason: str
    admitted_version: int
    trained_step: int | None
    stop_reason: str | None
    text: str
    prompt: str | None = None  # None: the run did not write its questions down
    answer: str | None = None  # the gold answer
    row: str | None = None  # FILE:LINE of the question, where it is a row of a file


class ExportedQuestion(Record, frozen=True):
    """One line of ``questions.jsonl``: what was asked, and what the reward compared with."""

    id: str
    prompt: str
    answer: str
    row: str | None = None


_QUESTIONS = msgspec.json.Decoder(ExportedQuestion)


def read_trajectories(path: str | Path) -> Iterator[ExportedTrajectory]:
    """All trajectories of a run, in the order in which they were issued.

    Raises:
        RunFolderError: there is no run.
        StoreError: its ledger cannot be read, or is not what was written.
    """
    folder = RunFolder.open(path)
    questions = {question.id: question for question in read_lines(folder.questions, _QUESTIONS)}
    prompts = msgspec.msgpack.Decoder(tuple[int, ...])
    with reading(folder.ledger) as connection:
        check_rows(connection, folder.ledger)
        for group, prompt_id, member, prompt, payload, interrupted, *rest in connection.execute(_ROWS):
            reward, verdict, *_, stop_reason = rest
            columns = (verdict, reward, stop_reason, interrupted)
            answer = _NOTHING if payload is None else decode_payload(trajectory_id(group, member), columns, payload)
            tokens = () if prompt is None else prompts.decode(prompt)
            yield _exported(group, prompt_id, member, tokens, answer, rest, questions.get(prompt_id))


def export_run(path: str | Path, file: str | Path) -> int:
    """Write all trajectories of a run to `file`, one a line; returns how many. The file is whole or absent.

    Raises:
        RunFolderError: there is no run, or `file` cannot be written.
        StoreError: the ledger cannot be read, or is not what was written.
    """
    target = Path(file)
    part = target.with_name(f".{target.name}.{os.getpid()}.part")
    encoder, count = msgspec.json.Encoder(), 0
    try:
        with part.open("wb") as output:
            for trajectory in read_trajectories(path):
                output.write(encoder.encode(trajectory) + b"\n")
                count += 1
        part.replace(target)
    except OSError as error:
        problem = Problem(str(target), f"cannot be written: {error.strerror}", "give a file in a folder of your own")
        raise RunFolderError([problem]) from error
    finally:
        part.unlink(missing_ok=True)
    return count


def _exported(
    group: str,
    prompt_id: str,
    member: int,
    prompt: tuple[int, ...],
    answer: Payload,
    rest: list[object],
    question: ExportedQuestion | None,
) -> ExportedTrajectory:
    reward, verdict, state, reason, admitted_version, trained_step, stop_reason = rest
    fields = {
        "id": trajectory_id(group, member),
        "group": group,
        "prompt_id": prompt_id,
        "prompt_token_ids": prompt,
        "token_ids": [token for segment in answer.segments for token in segment.token_ids],
        "behavior_logprobs": [logprob for segment in answer.segments for logprob in segment.behavior_logprobs],
        "versions": [version for segment in answer.segments for version in segment.versions],
        "given": _given(answer.segments),
        "reward": reward,
        "verdict": verdict,
        "state": state,
        "reason": reason,
        "admitted_version": admitted_version,
        "trained_step": trained_step,
        "stop_reason": stop_reason,
        "text": answer.text,
    }
    if question is not None:
        fields |= {"prompt": question.prompt, "answer": question.answer, "row": question.row}
    return msgspec.convert(fields, ExportedTrajectory)


def _given(segments: tuple[Segment, ...]) -> list[tuple[int, int]]:
    ends = list(accumulate((len(segment.token_ids) for segment in segments), initial=0))
    return [span for span, segment in zip(pairwise(ends), segments, strict=True) if not segment.versions]
