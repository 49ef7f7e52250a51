"""Records as collate() receives them."""

import pickle

import numpy as np

from data.record import Column, Records


def make_records() -> Records:
    """Five records that stand in another order in their columns."""
    columns: dict[str, Column] = {
        "number": [3, 0, 4, 1, 2],
        "text": list("dxeyz"),
        "block": np.arange(10).reshape(5, 2),
        "more": [None] * 5,
    }
    return Records(columns, np.array([1, 3, 4, 0, 2]))


def test_records_stand_where_their_places_say() -> None:
    records = make_records()
    assert records.column("number") == [0, 1, 2, 3, 4]
    assert records.column("block").tolist() == [[2, 3], [6, 7], [8, 9], [0, 1], [4, 5]]  # type: ignore[union-attr]
    assert [(row["number"], row["text"], row["block"].tolist()) for row in records] == [
        (0, "x", [2, 3]),
        (1, "y", [6, 7]),
        (2, "z", [8, 9]),
        (3, "d", [0, 1]),
        (4, "e", [4, 5]),
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
    assert part.column("block").tolist() == [[6, 7], [8, 9]]
    assert len(sent) < len(pickle.dumps(make_records()))
