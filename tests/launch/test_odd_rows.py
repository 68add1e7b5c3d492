"""Rows of a file that are held out and trained on, that contradict each other, or that are there twice, are told of,
each kind with its count and its first place; nothing is said of questions that were made on the spot. Gold answers with
digits of other scripts are told, with count, first place and code point."""

from stretto.rollout.questions import Question, Questions
from stretto_app.extensions.preflight.notes import repeated, strange_digits


def row(line: int, text: str, answer: str = "1", messages: tuple[dict[str, str], ...] = ()) -> Question:
    return Question(id=str(line), text=text, answer=answer, messages=messages, place=f"train.jsonl:{line}")


def test_rows_that_differ_are_no_matter() -> None:
    assert repeated(Questions([row(1, "a"), row(2, "b")], [row(3, "c")])) == []


def test_a_held_out_row_that_is_trained_on_is_named() -> None:
    (told,) = repeated(Questions([row(1, "a"), row(2, "b")], [row(7, "b"), row(8, "a"), row(9, "c")]))
    assert told == (
        "held-out questions that are also trained on, which biases the held-out accuracy: 2; "
        "the first is train.jsonl:7, as in train.jsonl:2"
    )


def test_a_file_that_is_both_is_meant_to_be() -> None:
    rows = [row(1, "a"), row(2, "b")]
    assert repeated(Questions(rows, rows)) == []


def test_rows_that_contradict_each_other_and_rows_that_are_there_twice_are_told_apart() -> None:
    training = [row(1, "a"), row(2, "a", "2"), row(3, "a"), row(4, "b"), row(5, "a")]
    contrary, same = repeated(Questions(training, []))
    assert contrary.startswith(
        "questions that an earlier row has with another answer: 1; the first is train.jsonl:2, as"
    )
    assert same.startswith("questions that an earlier row has with the same answer: 2; the first is train.jsonl:3, as")


def test_held_out_rows_are_compared_with_each_other_and_their_answers_with_those_trained_on() -> None:
    held_out = [row(7, "b"), row(8, "b"), row(9, "c", "2"), row(10, "d"), row(11, "d", "3")]
    leaked, contrary, same = repeated(Questions([row(1, "a"), row(2, "c")], held_out))
    assert leaked.endswith("accuracy: 1; the first is train.jsonl:9, as in train.jsonl:2")
    assert contrary.endswith("with another answer: 2; the first is train.jsonl:9, as in train.jsonl:2")
    assert same.endswith("with the same answer: 1; the first is train.jsonl:8, as in train.jsonl:7")


def test_chats_are_the_same_only_if_every_message_is() -> None:
    one, other = ({"role": "user", "content": "a"},), ({"role": "system", "content": "a"},)
    assert repeated(Questions([row(1, "a", messages=one), row(2, "a", messages=other)], [])) == []
    assert len(repeated(Questions([row(1, "a", messages=one), row(2, "a", messages=one)], []))) == 1


def test_what_is_made_on_the_spot_may_repeat() -> None:
    made = Question(id="0", text="1+1=", answer="2")
    assert repeated(Questions([made, made], [made])) == []


def asked(*golds: str) -> Questions:
    return Questions(
        [Question(id=str(n), text="?", answer=gold, place=f"a.jsonl:{n}") for n, gold in enumerate(golds)], []
    )


def test_digits_of_full_width_are_named_with_the_first_place() -> None:
    (told,) = strange_digits(asked("12", "１２", "٣"))
    assert told.endswith("2; the first is a.jsonl:1: '１' (U+FF11)")


def test_powers_and_plain_digits_are_no_matter() -> None:
    assert strange_digits(asked("x²", "½", "12")) == []
