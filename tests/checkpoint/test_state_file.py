"""A state file is an ordinary torch file, verified before it is believed; a bad disk is not a bad file."""

from __future__ import annotations

import io
import os
import pathlib
import threading
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from ckptrun import faults
from ckptrun.checkpoint import state_file
from ckptrun.checkpoint.commit import write_file
from ckptrun.checkpoint.past_cache import SECTOR_BYTES
from ckptrun.checkpoint.state_file import read_state, write_state
from ckptrun.errors import DamagedCheckpointError, IncompatibleError, NoCheckpointError
from ckptrun.records import FileRecord
from ckptrun.storage import retry


def make_state() -> dict[str, Any]:
    weight = torch.arange(60_000, dtype=torch.float32).reshape(300, 200)
    return {
        "state_dict": {"weight": weight, "tied": weight, "row": weight[3]},
        "half": torch.ones(5, dtype=torch.bfloat16),
        "empty": torch.empty(0),
        "global_step": 12,
        "name": "ü",
    }


@pytest.fixture
def written(tmp_path: Path) -> tuple[str, FileRecord]:
    record = write_file(str(tmp_path), "state.ckpt", lambda f: write_state(f, make_state()))
    return str(tmp_path / "state.ckpt"), record


@pytest.fixture
def no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retry, "RETRY_WAITS_S", (0.0, 0.0, 0.0))


@pytest.fixture(params=["small", "large"])
def size(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """A large file is hashed while torch reads it; here any file can be one."""
    monkeypatch.setattr(state_file, "_HASHED_BESIDE_BYTES", 0 if request.param == "large" else 1 << 40)
    return str(request.param)


def assert_same(found: dict[str, Any]) -> None:
    expected = make_state()
    assert found.keys() == expected.keys()
    assert torch.equal(found["state_dict"]["weight"], expected["state_dict"]["weight"])
    assert found["state_dict"]["weight"].data_ptr() == found["state_dict"]["tied"].data_ptr()
    assert found["state_dict"]["row"].untyped_storage()._cdata == (
        found["state_dict"]["weight"].untyped_storage()._cdata
    )
    assert torch.equal(found["half"], expected["half"])
    assert found["empty"].shape == (0,)
    assert (found["global_step"], found["name"]) == (12, "ü")


@pytest.mark.usefixtures("size")
def test_there_and_back(written: tuple[str, FileRecord]) -> None:
    path, record = written
    assert os.path.getsize(path) == record.size_bytes
    assert_same(read_state(path, checksum=record.checksum, size_bytes=record.size_bytes))
    assert_same(read_state(path))


def test_an_ordinary_torch_file(written: tuple[str, FileRecord]) -> None:
    path, _ = written
    assert_same(torch.load(path, weights_only=True))
    assert_same(torch.load(path, weights_only=True, mmap=True))


def test_files_that_torch_wrote_itself_are_read(tmp_path: Path) -> None:
    torch.save(make_state(), tmp_path / "zip.ckpt")
    assert_same(read_state(str(tmp_path / "zip.ckpt")))
    torch.save(make_state(), tmp_path / "legacy.ckpt", _use_new_zipfile_serialization=False)
    assert_same(read_state(str(tmp_path / "legacy.ckpt")))


def test_torchs_option_is_put_back_also_where_others_save_at_once() -> None:
    assert torch.serialization.get_crc32_options() is True
    threads = [
        threading.Thread(target=lambda: write_state(io.BytesIO(), {"x": torch.ones(10)})) for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.serialization.get_crc32_options() is True
    with pytest.raises(AttributeError):
        write_state(io.BytesIO(), {"x": lambda: 0})
    assert torch.serialization.get_crc32_options() is True


# --- damage --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kept", [0.0, 0.5, 0.999])
def test_truncated(written: tuple[str, FileRecord], kept: float) -> None:
    path, record = written
    os.truncate(path, int(record.size_bytes * kept))
    with pytest.raises(DamagedCheckpointError, match="is truncated") as raised:
        read_state(path, checksum=record.checksum, size_bytes=record.size_bytes)
    assert path in raised.value.message
    assert str(record.size_bytes) in raised.value.message
    with pytest.raises(DamagedCheckpointError, match="found the checksum"):
        read_state(path, checksum=record.checksum)
    with pytest.raises(DamagedCheckpointError, match="cannot be read as a torch file"):
        read_state(path)


@pytest.mark.usefixtures("size")
@pytest.mark.parametrize("place", [0.0, 0.3, 0.7, 0.9999])
def test_one_wrong_byte(written: tuple[str, FileRecord], place: float) -> None:
    path, record = written
    with open(path, "r+b") as f:
        f.seek(int((record.size_bytes - 1) * place))
        byte = f.read(1)[0]
        f.seek(-1, os.SEEK_CUR)
        f.write(bytes([byte ^ 1]))
    with pytest.raises(DamagedCheckpointError) as raised:
        read_state(path, checksum=record.checksum, size_bytes=record.size_bytes)
    assert path in raised.value.message
    assert f"expected {record.checksum}" in raised.value.message
    assert "found the checksum xxh3_64:" in raised.value.message


def test_what_was_read_of_a_damaged_large_file_is_dropped(
    written: tuple[str, FileRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where torch made something of it, and where what it raised says nothing of damage."""
    path, record = written
    monkeypatch.setattr(state_file, "_HASHED_BESIDE_BYTES", 0)
    wrong = f"{record.checksum[:-1]}{'0' if record.checksum[-1] != '0' else '1'}"
    with pytest.raises(DamagedCheckpointError, match="found the checksum"):
        read_state(path, checksum=wrong)

    def runs_out(*_: Any, **__: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(torch, "load", runs_out)
    with pytest.raises(DamagedCheckpointError, match="found the checksum"):
        read_state(path, checksum=wrong)
    with pytest.raises(MemoryError):
        read_state(path, checksum=record.checksum)


def test_nothing_is_interpreted_before_its_checksum_was_right(
    written: tuple[str, FileRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = written
    os.truncate(path, record.size_bytes - 1)
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(DamagedCheckpointError):
        read_state(path, checksum=record.checksum)


def test_not_a_torch_file(tmp_path: Path) -> None:
    for name, data in {"empty": b"", "text": b"not a checkpoint\n" * 100, "zip": b"PK\x03\x04" * 50}.items():
        path = tmp_path / name
        path.write_bytes(data)
        with pytest.raises(DamagedCheckpointError, match="cannot be read as a torch file") as raised:
            read_state(str(path))
        assert str(path) in raised.value.message


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(DamagedCheckpointError, match="is missing"):
        read_state(str(tmp_path / "state.ckpt"))


def test_a_wrong_checksum_is_read_twice(
    written: tuple[str, FileRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, record = written
    answers = iter(["xxh3_64:0000000000000000", record.checksum])
    monkeypatch.setattr(state_file, "checksum_of", lambda raw, algorithm: (next(answers), 0))
    assert_same(read_state(path, checksum=record.checksum))


def test_a_checksum_of_another_kind(written: tuple[str, FileRecord]) -> None:
    with pytest.raises(IncompatibleError, match="blake3"):
        read_state(written[0], checksum="blake3:00")


def test_objects_that_would_run_code(tmp_path: Path) -> None:
    path = tmp_path / "foreign.ckpt"
    torch.save({"hyper_parameters": {"path": pathlib.PurePosixPath("x")}}, path)
    with pytest.raises(IncompatibleError, match=r"pathlib\.PurePosixPath"):
        read_state(str(path))


# --- the disk ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("no_waits")
@pytest.mark.usefixtures("size")
def test_an_io_error_is_retried(written: tuple[str, FileRecord]) -> None:
    path, record = written
    with faults.armed("state:read:1=raise:EIO"):
        assert_same(read_state(path, checksum=record.checksum, size_bytes=record.size_bytes))


@pytest.mark.usefixtures("no_waits")
@pytest.mark.usefixtures("size")
def test_an_io_error_that_stays_is_no_damage(written: tuple[str, FileRecord]) -> None:
    path, record = written
    with faults.armed("state:read:1+=raise:EIO"), pytest.raises(NoCheckpointError) as raised:
        read_state(path, checksum=record.checksum)
    assert not isinstance(raised.value, DamagedCheckpointError)
    assert "Input/output error" in raised.value.message
    assert path in raised.value.message


@pytest.mark.usefixtures("no_waits")
@pytest.mark.parametrize("arrival", [1, 2, 5])
def test_an_io_error_within_torchs_reader_stays_one(written: tuple[str, FileRecord], arrival: int) -> None:
    path, _ = written
    with faults.armed(f"state:read:{arrival}=raise:EIO"):
        assert_same(read_state(path))
    with faults.armed(f"state:read:{arrival}+=raise:EIO"), pytest.raises(NoCheckpointError) as raised:
        read_state(path)
    assert not isinstance(raised.value, DamagedCheckpointError)


def test_missing_rights_are_no_damage(tmp_path: Path) -> None:
    with pytest.raises(NoCheckpointError, match="Is a directory") as raised:
        read_state(str(tmp_path))
    assert not isinstance(raised.value, DamagedCheckpointError)


def test_large_tensors_begin_at_sectors_and_small_ones_take_none(tmp_path: Path) -> None:
    """A sector for each of many small ones would be most of the file."""
    small = {str(number): torch.zeros(10) for number in range(1000)}
    large = {str(number): torch.zeros(1 << 18) for number in range(3)}
    before = torch.utils.serialization.config.save.storage_alignment
    for name, state in (("small", small), ("large", large)):
        with (tmp_path / name).open("wb") as file:
            write_state(file, state)
    assert torch.utils.serialization.config.save.storage_alignment == before
    assert os.path.getsize(tmp_path / "small") < 1000 * 1024
    with zipfile.ZipFile(tmp_path / "large") as archive, (tmp_path / "large").open("rb") as file:
        tensors = [entry for entry in archive.infolist() if "/data/" in entry.filename]
        assert len(tensors) == 3
        for entry in tensors:
            file.seek(entry.header_offset)
            head = file.read(30)
            lengths = int.from_bytes(head[26:28], "little") + int.from_bytes(head[28:30], "little")
            assert (entry.header_offset + 30 + lengths) % SECTOR_BYTES == 0


@pytest.mark.parametrize("short", [0, 1, 59, 60, 61, 62, 63, 64, 65, SECTOR_BYTES - 1])
def test_what_fills_up_to_a_sector_fits_into_the_zip(tmp_path: Path, short: int) -> None:
    """With sectors of 64 kB torch writes, without an error, what it then reads from a wrong place."""
    sizes = [(4 << 20) - short, (1 << 20) + short, 3 << 20]
    state = {str(number): torch.randint(256, (size,), dtype=torch.uint8) for number, size in enumerate(sizes)}
    record = write_file(str(tmp_path), "state.ckpt", lambda file: write_state(file, state))
    found = read_state(str(tmp_path / "state.ckpt"), checksum=record.checksum, size_bytes=record.size_bytes)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
