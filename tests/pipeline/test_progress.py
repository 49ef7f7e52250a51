"""What a transfer says of itself."""

from pipeline.progress import Progress, Transfer, listening


def test_a_transfer_tells_how_much_how_fast_and_how_long_yet() -> None:
    now = 0.0
    heard: list[Progress] = []
    with listening(heard.append):
        transfer = Transfer("upload", "shards", 4, 400_000_000, lambda: now)
        transfer.skip(1, 100_000_000)
        assert str(heard[-1]) == "upload: 1/4 shards"
        now = 1.0
        transfer.advance(20_000_000)
        assert str(heard[-1]) == "upload: 1/4 shards, 20.0/300.0 MB, 20.0 MB/s, 0:14 left"
        now = 20.0
        transfer.advance(80_000_000)
        now = 21.0
        transfer.advance(10_000_000)
        # The rate is that of the last seconds.
        assert str(heard[-1]).endswith("110.0/300.0 MB, 4.5 MB/s, 0:42 left")
        transfer.finish(3)
    assert (heard[-1].done, heard[-1].total) == (4, 4)


def test_hours_are_told_as_hours() -> None:
    now = 0.0
    heard: list[Progress] = []
    with listening(heard.append):
        transfer = Transfer("upload", "shards", 2, 10_000_000_000, lambda: now)
        now = 1.0
        transfer.advance(1_000_000)
    assert heard[-1].note == "1.0/10,000.0 MB, 1.0 MB/s, 2:46:39 left"
