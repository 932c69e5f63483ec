"""Archives read by position: the same members as tarfile finds, and no silence where something is wrong."""

from __future__ import annotations

import io
import tarfile

import pytest
from made_shards import write_tar, zero

from zoo.data.shards.tar import Damaged, Refused, members, next_header, read_member

CONTENT = [(f"{n}.bin", bytes([n]) * size) for n, size in enumerate((0, 1, 511, 512, 513, 3000))]
LONG = "folder/" * 30 + "long name.bin"


def reader(path):
    data = path.read_bytes()
    return (lambda offset, length: data[offset : offset + length]), len(data)


def found(path, start=0):
    return list(members(*reader(path), start))


def tail(path):
    return [member.name for member in found(path)]


@pytest.mark.parametrize("kind", [tarfile.USTAR_FORMAT, tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_the_members_are_those_that_tarfile_finds(tmp_path, kind):
    extra = [] if kind == tarfile.USTAR_FORMAT else [(LONG, b"long"), ("ungewöhnlich\u4e2d.bin", b"text")]
    path = write_tar(tmp_path / "a.tar", [*CONTENT, *extra, ("p" * 90 + "/" + "n" * 90, b"prefix")], kind)
    with tarfile.open(path) as file:
        expected = [(m.name, m.offset, m.offset_data, m.size) for m in file.getmembers()]
    got = found(path)
    assert [(m.name, m.start, m.data, m.size) for m in got] == expected
    assert all(member.is_file for member in got)
    # Each is found again from its own position, as training reads them.
    read, _ = reader(path)
    assert [read_member(read, member.start) for member in got] == got


def test_headers_before_each_member_as_webdataset_writes_them(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w", format=tarfile.PAX_FORMAT) as file:
        for name, content in CONTENT:
            member = tarfile.TarInfo(name)
            member.size, member.mtime = len(content), 1700000000.25  # a fraction needs a header of its own
            file.addfile(member, io.BytesIO(content))
    got = found(path)
    assert [member.name for member in got] == [name for name, _ in CONTENT]
    assert all(member.data - member.start == 3 * 512 for member in got)


def test_folders_are_told_from_files_and_dots_are_dropped(tmp_path):
    path = tmp_path / "a.tar"
    with tarfile.open(path, "w") as file:
        for name in ("./", "./sub"):
            member = tarfile.TarInfo(name)
            member.type = tarfile.DIRTYPE
            file.addfile(member)
        file.addfile(tarfile.TarInfo("./sub/1.png"))
    assert [(member.name.rstrip("/"), member.is_file) for member in found(path)][1:] == [
        ("sub", False),
        ("sub/1.png", True),
    ]


def test_sizes_beyond_what_octal_digits_hold():
    for kind in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        member = tarfile.TarInfo("huge.bin")
        member.size = 2**40 + 1
        header = member.tobuf(kind)
        got = read_member(lambda offset, length, h=header: h[offset : offset + length], 0)
        assert got is not None
        assert got.size == 2**40 + 1


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("/etc/x.png", "absolute"),
        ("C:/x.png", "absolute"),
        ("a/../../x.png", r"\.\."),
        ("..", r"\.\."),
        ("a\\..\\x.png", r"\.\."),
    ],
)
def test_names_that_lead_outside_are_refused(tmp_path, name, what):
    path = write_tar(tmp_path / "a.tar", [("fine.png", b"x"), (name, b"x")])
    with pytest.raises(Refused, match=what) as caught:
        found(path)
    assert caught.value.offset == 1024


@pytest.mark.parametrize("kind", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_a_long_name_is_looked_at_too(tmp_path, kind):
    path = write_tar(tmp_path / "a.tar", [("a/" * 80 + "../x.png", b"x")], kind)
    with pytest.raises(Refused, match=r"\.\."):
        found(path)


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (tarfile.SYMTYPE, "symbolic link"),
        (tarfile.LNKTYPE, "hard link"),
        (tarfile.FIFOTYPE, "pipe"),
        (tarfile.CHRTYPE, "device"),
        (tarfile.BLKTYPE, "device"),
        (tarfile.GNUTYPE_SPARSE, "sparse"),
    ],
)
def test_what_is_no_plain_file_is_refused(tmp_path, kind, what):
    path = tmp_path / "a.tar"
    member = tarfile.TarInfo("x.png")
    member.type, member.linkname = kind, "/etc/passwd"
    path.write_bytes(member.tobuf() + bytes(1024))
    with pytest.raises(Refused, match=what):
        found(path)


@pytest.mark.parametrize("size", [b"9" * 5000, b"x", b"-1"])
def test_a_pax_header_that_states_no_size_is_damage(tmp_path, size):
    record = b" size=" + size + b"\n"
    length = next(n for n in range(len(record), len(record) + 9) if len(str(n)) + len(record) == n)
    content = str(length).encode() + record
    header, member = tarfile.TarInfo("pax"), tarfile.TarInfo("x.png")
    header.type, header.size = tarfile.XHDTYPE, len(content)
    padded = content + bytes(-len(content) % 512)
    path = tmp_path / "a.tar"
    path.write_bytes(header.tobuf() + padded + member.tobuf() + bytes(1024))
    with pytest.raises(Damaged, match="states the size"):
        found(path)


def test_a_header_that_is_zeroed_is_not_the_end(tmp_path):
    path = write_tar(tmp_path / "a.tar", CONTENT)
    zero(path, found(path)[3].start)
    with tarfile.open(path) as file:
        assert len(file.getmembers()) == 3  # what others make of it
    with pytest.raises(Damaged, match="more than zeros"):
        found(path)


def test_joined_archives_are_not_half_read(tmp_path):
    path = write_tar(tmp_path / "a.tar", CONTENT)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(Damaged, match="more than zeros"):
        found(path)


def test_a_flipped_bit_in_a_header_is_damage(tmp_path):
    path = write_tar(tmp_path / "a.tar", CONTENT)
    start = found(path)[2].start
    zero(path, start + 3, 1, b"\xff")
    with pytest.raises(Damaged, match="checksum") as caught:
        found(path)
    assert caught.value.offset == start


@pytest.mark.parametrize("blocks", range(1, 13))
def test_wherever_an_archive_is_cut_it_is_said(tmp_path, blocks):
    path = write_tar(tmp_path / "a.tar", CONTENT)
    end = found(path)[-1].end
    assert end > 12 * 512
    whole = path.read_bytes()
    for cut in (blocks * 512, blocks * 512 + 7):
        path.write_bytes(whole[:cut])
        with pytest.raises(Damaged, match="cut off"):
            found(path)


def test_after_damage_the_next_header_is_found(tmp_path):
    path = write_tar(tmp_path / "a.tar", CONTENT)
    there = found(path)
    zero(path, there[4].start, 512, b"junk")
    read, size = reader(path)
    assert next_header(read, there[4].start + 512, size) == there[5].start
    assert next_header(read, there[5].start + 512, size) is None


def test_no_archive_at_all(tmp_path):
    path = tmp_path / "a.tar"
    for content in (b"", b"hello" * 1000, b"\xff\xd8\xff" + b"jpeg" * 1000):
        path.write_bytes(content)
        with pytest.raises(Damaged):
            found(path)
