"""Records as collate() receives them."""

import pickle

import numpy as np

from data.record import Column, Records


def make_records() -> Records:
    columns: dict[str, Column] = {
        "number": [0, 1, 2, 3, 4],
        "text": list("xyzde"),
        "block": np.arange(10).reshape(5, 2),
        "more": [None] * 5,
    }
    return Records(columns)


def test_records_are_seen_by_column_and_one_by_one() -> None:
    records = make_records()
    assert records.column("number") == [0, 1, 2, 3, 4]
    assert records.column("block").tolist() == [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]]  # type: ignore[union-attr]
    assert [(row["number"], row["text"], row["block"].tolist()) for row in records] == [
        (0, "x", [0, 1]),
        (1, "y", [2, 3]),
        (2, "z", [4, 5]),
        (3, "d", [6, 7]),
        (4, "e", [8, 9]),
    ]
    assert [list(row) for row in records] == [["number", "text", "block", "more"]] * 5
    assert (records[1]["text"], records[-1]["text"]) == ("y", "e")
    part = records[1:4][::-1]
    assert (len(part), part.column("text")) == (3, ["d", "z", "y"])
    assert [row["number"] for row in part] == [3, 2, 1]


def test_a_change_to_one_mapping_stays_there() -> None:
    records = make_records()
    for row in records:
        row.clear()
    assert [row["number"] for row in records] == [0, 1, 2, 3, 4]


def test_of_a_part_nothing_else_is_sent() -> None:
    sent = pickle.dumps(make_records()[1:3])
    part = pickle.loads(sent)
    assert part.column("number") == [1, 2]
    assert part.column("block").tolist() == [[2, 3], [4, 5]]
    assert len(sent) < len(pickle.dumps(make_records()))
