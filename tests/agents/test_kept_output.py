"""kept_output: which part of an agent's output its row keeps, and which lines an error quotes."""

import pytest

from agentrl.workers.agents.kept_output import HEAD_BYTES, TAIL_BYTES, KeptOutput, add_last_lines

KEY = "QWXZVJKUPGQWXZVJKU"


def kept(data: bytes, piece: int = 1000) -> str:
    output = KeptOutput([KEY, KEY[1:]])
    for at in range(0, len(data), piece):
        output.add(data[at : at + piece])
    return output.text()


@pytest.mark.parametrize("size", [0, 1, HEAD_BYTES, HEAD_BYTES + TAIL_BYTES])
def test_kept_output_is_whole_while_it_is_short(size: int) -> None:
    data = bytes(97 + place % 26 for place in range(size))
    assert kept(data) == data.decode()


def test_kept_output_of_any_length_has_its_beginning_and_its_end() -> None:
    text = kept(b"begin" + b"x" * 100_000 + b"end")
    assert (text[:5], text[-3:]) == ("begin", "end")
    assert "\n[94008 bytes left out]\n" in text
    assert len(text) < HEAD_BYTES + TAIL_BYTES + 100


def test_kept_output_shows_no_part_of_a_key_wherever_it_is_cut() -> None:
    for place in (*range(HEAD_BYTES - 30, HEAD_BYTES + 30), *range(20_000 - TAIL_BYTES - 40, 20_000 - TAIL_BYTES + 30)):
        data = bytearray(b"." * 20_000)
        data[place : place + len(KEY)] = KEY.encode()
        assert not set(kept(bytes(data), 777)) & set(KEY), place
    assert not set(kept(KEY.encode() * 2000)) & set(KEY)


@pytest.mark.parametrize("place", range(1, len(KEY)))
def test_kept_output_shows_no_key_with_a_colour_inside(place: int) -> None:
    assert KEY not in kept(KEY[:place].encode() + b"\x1b[1m" + KEY[place:].encode())


def test_kept_output_has_no_control_characters() -> None:
    assert kept(b"\x1b[2Jred\x00\x07 \xff\n") == "red\ufffd\ufffd \ufffd\n"


def test_add_last_lines_quotes_few_and_short_ones() -> None:
    assert add_last_lines("it failed", " \n") == "it failed"
    assert add_last_lines("it failed", "why\n\n") == "it failed: why"
    assert add_last_lines("it failed", "", explains=False) == "it failed"
    assert add_last_lines("it failed", "OK\n", explains=False).splitlines() == [
        "it failed.",
        "The last lines of its output:",
        "OK",
    ]
    many = add_last_lines("it failed", "\n".join(str(number) * 1000 for number in range(9)))
    assert [line[:1] for line in many.splitlines()] == ["i", "T", "4", "5", "6", "7", "8"]
    assert max(map(len, many.splitlines())) < 320
