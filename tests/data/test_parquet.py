"""Images in parquet files, and in what the datasets library reads; skipped where these aren't installed."""

from __future__ import annotations

import builtins
import io
import json
import pickle

import numpy as np
import pytest
from PIL import Image

from tiny import pixels
from zoo.data.loader import view_batches
from zoo.data.open import open_source, open_sources
from zoo.data.shards.order import ShardOrder, order_of
from zoo.data.source import UNLABELLED, ImageSource
from zoo.data.views.maker import PlannedViews
from zoo.data.views.params import CropSpec, ViewPlan
from zoo.errors import InputError

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


def encoded(seed):
    out = io.BytesIO()
    Image.fromarray(pixels(seed)).save(out, "PNG")
    return out.getvalue()


def structs(seeds):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    return pa.array([{"bytes": encoded(seed), "path": f"{seed}.png"} for seed in seeds], kind)


def write(path, columns, rows=4, names=None):
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(columns)
    if names is not None:
        features = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, row_group_size=rows)
    return path


def labelled(path, first, count, names=("cat", "dog", "eel"), **options):
    seeds = range(first, first + count)
    return write(path, {"image": structs(seeds), "label": [s % 3 for s in seeds]}, names=names, **options)


def assert_reads(source, seeds):
    assert len(source) == len(seeds)
    for index, seed in enumerate(seeds):
        assert np.array_equal(source.read(index), pixels(seed))


def labels(source):
    return [source.label(i) for i in range(len(source))]


def test_rows_of_several_files_by_row_groups(tmp_path):
    labelled(tmp_path / "a-0.parquet", 0, 10)
    labelled(tmp_path / "a-1.parquet", 10, 5)
    source = open_source(f"parquet:{tmp_path}")
    assert isinstance(source, ImageSource)
    assert source.stretches.tolist() == [4, 4, 2, 4, 1]
    assert_reads(source, range(15))
    assert_reads(pickle.loads(pickle.dumps(source)), range(15))
    assert source.classes == ("cat", "dog", "eel")
    assert labels(source) == [n % 3 for n in range(15)]
    assert source.where(5) == f"{tmp_path}/a-0.parquet: row 1 of row group 1"
    assert_reads(open_source(f"{tmp_path}/a-1.parquet"), range(10, 15))
    assert_reads(open_source(f"{tmp_path}/a-{{1,0}}.parquet"), [*range(10, 15), *range(10)])
    assert_reads(open_source(f"{tmp_path}/*.parquet"), range(15))
    before = source.fingerprint()
    labelled(tmp_path / "a-1.parquet", 11, 5)
    assert open_source(f"parquet:{tmp_path}").fingerprint() != before


@pytest.mark.parametrize("kind", [pa.binary(), pa.large_binary()])
def test_pictures_in_a_binary_column(tmp_path, kind):
    path = write(
        tmp_path / "a.parquet", {"jpg": pa.array([encoded(n) for n in range(5)], kind), "n": [1] * 5}
    )
    source = open_source(str(path))
    assert_reads(source, range(5))
    assert source.classes == ()
    assert labels(source) == [UNLABELLED] * 5


def test_labels_without_names_are_numbers_and_a_class_index_names_them(tmp_path):
    path = labelled(tmp_path / "a.parquet", 0, 6, names=None)
    assert open_source(str(path)).classes == ("0", "1", "2")
    assert open_source(str(path), class_names=("a", "b", "c", "d")).classes == ("a", "b", "c", "d")
    named = labelled(tmp_path / "b.parquet", 0, 6)
    source = open_source(str(named), class_names=("eel", "dog", "cat"))
    assert labels(source) == [2, 1, 0] * 2
    with pytest.raises(InputError, match="doesn't know: eel"):
        open_source(str(named), class_names=("dog", "cat"))


@pytest.mark.parametrize("values", [[0, None], [0, -1], [0, 10**7]])
def test_labels_that_are_none(tmp_path, values):
    path = write(tmp_path / "a.parquet", {"image": structs([0, 1]), "label": pa.array(values, pa.int64())})
    assert labels(open_source(str(path))) == [UNLABELLED] * 2


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_batches_are_the_same_for_any_workers(tmp_path):
    for number in range(4):
        labelled(tmp_path / f"{number}.parquet", 12 * number, 12)
    source = open_source(f"parquet:{tmp_path}")
    order = order_of(source, 6, 1)
    assert isinstance(order, ShardOrder)
    assert (order.lanes, order.window) == (1, 4)
    maker = PlannedViews(ViewPlan((CropSpec(8, 0.3, 1.0),)))

    def drawn(workers):
        found = view_batches(source, maker, order, first_step=0, last_step=10, workers=workers)
        return [(batch.ids.tolist(), batch.views[0].numpy().tobytes()) for batch in found]

    alone = drawn(0)
    assert sorted(sample for ids, _ in alone[:8] for sample in ids) == list(range(48))
    assert drawn(1) == drawn(3) == alone
    assert len(source._held) <= 5


@pytest.mark.parametrize(
    ("columns", "what"),
    [
        ({"label": [1]}, "no columns that could hold images"),
        ({"a": [b"x"], "b": [b"y"]}, "2 columns that could hold images: a, b"),
    ],
)
def test_files_without_images(tmp_path, columns, what):
    path = write(tmp_path / "a.parquet", columns)
    with pytest.raises(InputError, match=what) as caught:
        open_source(str(path))
    assert caught.value.where == str(path)


def test_what_is_wrong_is_said(tmp_path):
    with pytest.raises(InputError, match="no parquet files in this folder"):
        open_source(f"parquet:{tmp_path}")
    with pytest.raises(InputError, match="matches no shard"):
        open_source(f"{tmp_path}/x.parquet")
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(InputError, match="can't be read"):
        open_source(f"{tmp_path}/text.parquet")
    labelled(tmp_path / "s" / "0.parquet", 0, 2)
    write(tmp_path / "s" / "1.parquet", {"picture": structs([1])})
    with pytest.raises(InputError, match="other columns"):
        open_source(f"parquet:{tmp_path}/s")
    write(tmp_path / "none.parquet", {"image": pa.array([], pa.binary())})
    with pytest.raises(InputError, match="no rows"):
        open_source(f"{tmp_path}/none.parquet")


def test_a_row_without_a_picture_is_named(tmp_path):
    kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = pa.array(
        [{"bytes": encoded(0)}, {"bytes": None, "path": "/etc/passwd"}, None, {"bytes": b"junk"}], kind
    )
    source = open_source(str(write(tmp_path / "a.parquet", {"image": rows})))
    assert np.array_equal(source.read(0), pixels(0))
    for index, what in ((1, "holds no picture"), (2, "holds no picture"), (3, "text file")):
        with pytest.raises(InputError, match=what) as caught:
            source.read(index)
        assert caught.value.where == f"{tmp_path}/a.parquet: row {index} of row group 0"


def test_a_file_that_is_damaged_after_it_was_opened(tmp_path):
    path = labelled(tmp_path / "a.parquet", 0, 8)
    source = open_source(str(path))
    data = bytearray(path.read_bytes())
    data[4:3000] = bytes(2996)
    path.write_bytes(bytes(data))
    with pytest.raises(InputError, match="parquet file can't be read"):
        source.read(0)


def test_without_pyarrow(tmp_path, monkeypatch):
    path = labelled(tmp_path / "a.parquet", 0, 2)
    real = builtins.__import__

    def without(name, *rest, **options):
        if name.startswith("pyarrow"):
            raise ImportError("no pyarrow")
        return real(name, *rest, **options)

    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(InputError, match="pyarrow, which is not installed") as caught:
        open_source(str(path))
    assert caught.value.fix == "pip install pyarrow"


# --- the datasets library ---


@pytest.fixture()
def hub(tmp_path, monkeypatch):
    """A folder that the library loads as it would a data set of the hub."""
    for variable in ("HF_HOME", "HF_DATASETS_CACHE"):
        monkeypatch.setenv(variable, str(tmp_path / "cache"))
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(datasets.config, "HF_MODULES_CACHE", str(tmp_path / "cache"))
    labelled(tmp_path / "set" / "data" / "train-0.parquet", 0, 7)
    labelled(tmp_path / "set" / "data" / "validation-0.parquet", 20, 3)
    return f"hf-dataset:{tmp_path}/set"


def test_a_set_of_the_hub(hub):
    source = open_source(hub)
    assert_reads(source, range(7))
    assert source.classes == ("cat", "dog", "eel")
    assert labels(source) == [0, 1, 2, 0, 1, 2, 0]
    assert source.where(2) == f"{hub}[2]"
    assert source.fingerprint()["count"] == 7
    assert_reads(open_source(hub, "val"), range(20, 23))
    assert_reads(open_source(f"{hub}:validation"), range(20, 23))
    assert labels(open_source(hub, class_names=("eel", "dog", "cat")))[:3] == [2, 1, 0]
    assert len(open_sources([hub, f"{hub}:validation"])) == 10
    assert_reads(pickle.loads(pickle.dumps(source)), range(7))


def test_a_part_or_a_set_that_is_not_there(hub):
    with pytest.raises(InputError, match="no part other") as caught:
        open_source(f"{hub}:other")
    assert "train, validation" in caught.value.fix
    with pytest.raises(InputError, match="can't be loaded"):
        open_source(f"{hub}-not")
