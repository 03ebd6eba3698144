"""Megatron's distributed checkpoints: pickles read as data, names of tensors, settings of the model."""

import rltrain.training.megatron  # noqa: F401  # isort: skip  # first: it loads Megatron without torch's compiler
import io
import json
import pickle
import shutil
import zipfile
from argparse import Namespace
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.transformer.enums import AttnBackend
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from rltrain.checkpoint.conversion import chunks_of_writer
from rltrain.checkpoint.megatron_arguments import compare_arguments, megatron_arguments
from rltrain.checkpoint.megatron_keys import GlobalTensors, extra_state_keys
from rltrain.checkpoint.megatron_pickles import map_file, plain, read_pickle, read_torch_pickle, saved_tensor
from rltrain.checkpoint.megatron_reader import COMMON_OBJECT, MegatronReader
from rltrain.errors import CheckpointError
from rltrain.models import Architecture, canonical_tensors
from rltrain.runtime.grid import Grid
from tests.support.checkpoint_files import ARCHITECTURES, ITERATION, canonical_values, read_megatron, write_megatron

QWEN3 = ARCHITECTURES["qwen3"]
FOLDER = f"iter_{ITERATION:07d}"


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("written")
    write_megatron(root, QWEN3)
    return root


@pytest.fixture
def copy(written: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(written, tmp_path / "copy"))


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_was_written_is_read(name: str, tmp_path: Path) -> None:
    architecture = ARCHITECTURES[name]
    write_megatron(tmp_path, architecture, Grid((0, 1, 2), tp=3), padded_vocab_size=24)
    read, expected = read_megatron(tmp_path, architecture), canonical_values(architecture)
    assert [key for key, value in expected.items() if not torch.equal(read[key], value)] == []


def test_the_folder_is_megatrons(written: Path) -> None:
    assert (written / "latest_checkpointed_iteration.txt").read_text() == "7"
    files = {path.name for path in (written / FOLDER).iterdir()}
    assert {".metadata", "common.pt", "metadata.json", "__0_0.distcp"} <= files
    assert not any("part" in name for name in files)
    assert json.loads((written / FOLDER / "metadata.json").read_text())["sharded_backend"] == "torch_dist"


def test_a_release_has_no_iteration(tmp_path: Path) -> None:
    write_megatron(tmp_path, QWEN3, iteration=None)
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "release"
    reader = MegatronReader(tmp_path, "--input")
    assert reader.folder.name == "release"
    assert reader.iteration == 0


def test_torch_reads_the_metadata(written: Path) -> None:
    metadata = FileSystemReader(written / FOLDER).read_metadata()
    stored = metadata.state_dict_metadata["decoder.layers.mlp.linear_fc1.weight"]
    assert stored.size == (4, 48, 12)
    assert len(stored.chunks) == 16, "four layers, gate and up, two shares"
    assert stored.properties.dtype == torch.float32


def test_types_are_kept_but_for_the_routers_bias(tmp_path: Path) -> None:
    write_megatron(tmp_path, ARCHITECTURES["deepseek_v3"], dtype=torch.bfloat16)
    reader = MegatronReader(tmp_path, "--input")
    float32 = {key for key, (_, dtype) in reader.tensors.items() if dtype == torch.float32}
    assert float32 == {key for key in reader.tensors if key.endswith("expert_bias")} != set()
    assert {dtype for key, (_, dtype) in reader.tensors.items() if key not in float32} == {torch.bfloat16}


def test_an_iterations_folder_is_read_itself(written: Path) -> None:
    reader = MegatronReader(written / FOLDER, "--input")
    assert reader.iteration == ITERATION
    assert reader.architecture_arguments["num_layers"] == 4
    assert reader.architecture_arguments["params_dtype"] == "torch.float32"


def move_common_state(folder: Path, file: str) -> None:
    """Moves `common.pt` into `file` beside the chunks, stored as an object. Megatron 0.19 does the same."""
    with torch.serialization.safe_globals([Namespace]):
        common = torch.load(folder / "common.pt", weights_only=True)
    (folder / "common.pt").unlink()
    with (folder / file).open("ab") as chunks:
        first = chunks.tell()
        buffer = io.BytesIO()
        torch.save([common], buffer)
        chunks.write(buffer.getvalue())
    metadata, index = FileSystemReader(folder).read_metadata(), MetadataIndex(COMMON_OBJECT)
    metadata.state_dict_metadata[COMMON_OBJECT] = BytesStorageMetadata()
    metadata.storage_data[index] = _StorageInfo(file, first, buffer.tell())
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_arguments_are_read_where_later_releases_of_megatron_have_them(written: Path, copy: Path) -> None:
    move_common_state(copy / FOLDER, "__0_0.distcp")
    found, expected = (MegatronReader(path, "--input") for path in (copy, written))
    assert found.architecture_arguments == expected.architecture_arguments != {}
    assert found.iteration == expected.iteration
    assert found.ignored == expected.ignored


def test_arguments_outside_of_the_folder_are_not_followed(copy: Path) -> None:
    move_common_state(copy / FOLDER, "../elsewhere")
    with pytest.raises(CheckpointError, match="'../elsewhere', which is not in its folder"):
        MegatronReader(copy, "--input")


def test_a_box_over_several_chunks_is_put_together(written: Path) -> None:
    reader = MegatronReader(written, "--input")
    key = "decoder.layers.mlp.linear_fc1.weight"
    whole = reader.read(key, (0, 0, 0), (4, 48, 12))
    values = canonical_values(QWEN3)
    assert torch.equal(whole[2, :24], values["model.layers.2.mlp.gate_proj.weight"])
    assert torch.equal(reader.read(key, (1, 10, 3), (2, 30, 5)), whole[1:3, 10:40, 3:8])


def test_a_box_of_one_chunk_is_not_copied(written: Path) -> None:
    reader = MegatronReader(written, "--input")
    key = "decoder.layers.mlp.linear_fc2.weight"
    box, inside = reader.read(key, (1, 0, 0), (1, 12, 12)), reader.read(key, (1, 3, 4), (1, 2, 5))
    assert inside.data_ptr() == box[:, 3:, 4:].data_ptr(), "both are views of the mapped file"
    assert torch.equal(inside, box[:, 3:5, 4:9])
    parts = reader.read(key, (1, 0, 0), (2, 12, 12))
    assert parts.untyped_storage().nbytes() == 2 * 12 * 12 * 4, "a read across chunks takes only the memory of its box"


def test_states_of_training_are_left_out(written: Path) -> None:
    reader = MegatronReader(written, "--input")
    assert reader.ignored
    assert all("_extra_state" in key for key in reader.ignored)


FC2 = "decoder.layers.mlp.linear_fc2.weight"


def _in_metadata(change: Callable[[Any], None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        metadata = pickle.loads((folder / ".metadata").read_bytes())
        change(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))

    return rewrite


def _cut(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])


def _overwrite(folder: Path) -> None:
    file = folder / "__0_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))


@_in_metadata
def _flatten_a_chunk(metadata: Any) -> None:
    chunk = metadata.state_dict_metadata[FC2].chunks[0]
    chunk.sizes = torch.Size([chunk.sizes.numel()])


@_in_metadata
def _swap_chunks(metadata: Any) -> None:
    places = list(metadata.storage_data.values())
    first, other = places[0], next(place for place in places if place.length != places[0].length)
    for name in ("relative_path", "offset", "length"):
        mine, theirs = getattr(first, name), getattr(other, name)
        setattr(first, name, theirs)
        setattr(other, name, mine)


@_in_metadata
def _point_outside(metadata: Any) -> None:
    for place in metadata.storage_data.values():
        place.relative_path = "../" + place.relative_path


@_in_metadata
def _add_an_object(metadata: Any) -> None:
    state = metadata.state_dict_metadata
    state["surprise/shard_0_1"] = state.pop("decoder.final_layernorm._extra_state/shard_0_1")


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "cut file": (_cut, r"__0_0\.distcp has \d+ bytes; expected at least \d+: it was cut short"),
    "missing file": (
        lambda folder: (folder / "__3_0.distcp").unlink(),
        r"__3_0\.distcp does not exist, but \.metadata",
    ),
    "overwritten file": (_overwrite, r"__0_0\.distcp is damaged at byte \d+ \(tensor \S+\)"),
    "lost chunk": (
        _in_metadata(lambda metadata: metadata.state_dict_metadata[FC2].chunks.pop()),
        r"the chunks of decoder\.layers\.mlp\.linear_fc2\.weight in \S+ hold 144 of the 288 elements",
    ),
    "chunk of other dimensions": (_flatten_a_chunk, r"a chunk has 1 dimensions, its tensor 3"),
    "chunks in each other's place": (_swap_chunks, r"holds \[.*\] of torch\.float32 at byte \d+; \.metadata places \["),
    "file elsewhere": (_point_outside, r"'\.\./\S+', which is not in its folder"),
    "unknown object": (_add_an_object, r"other than tensors and known training state: surprise/shard_0_1"),
    "no metadata": (lambda folder: (folder / ".metadata").unlink(), r"\.metadata does not exist, but latest_check"),
    "cut metadata": (
        lambda folder: (folder / ".metadata").write_bytes((folder / ".metadata").read_bytes()[:500]),
        r"\.metadata is damaged",
    ),
    "other metadata": (
        lambda folder: (folder / ".metadata").write_bytes(pickle.dumps({})),
        r"not the metadata of torch\.distributed\.checkpoint",
    ),
    "no arguments": (lambda folder: (folder / "common.pt").unlink(), r"cannot read \S+common\.pt"),
    "damaged arguments": (lambda folder: (folder / "common.pt").write_text("?"), r"common\.pt is damaged"),
    "other format": (
        lambda folder: (folder / "metadata.json").write_text('{"sharded_backend": "zarr"}'),
        r"sharded_backend is 'zarr'; expected 'torch_dist'",
    ),
    "odd tracker": (
        lambda folder: (folder.parent / "latest_checkpointed_iteration.txt").write_text("soon"),
        r"holds 'soon'; expected the number of an iteration",
    ),
    "no tracker": (
        lambda folder: (folder.parent / "latest_checkpointed_iteration.txt").unlink(),
        r"neither latest_checkpointed_iteration\.txt nor \.metadata",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_told(kind: str, copy: Path) -> None:
    damage, message = DAMAGE[kind]
    damage(copy / FOLDER)
    with pytest.raises(CheckpointError, match=message) as told:
        read_megatron(copy, QWEN3)
    assert "(option --input)" in str(told.value)


def saved(value: Any) -> memoryview:
    """Returns the bytes of a saved value as in a checkpoint: not aligned, between other bytes."""
    file = io.BytesIO()
    torch.save(value, file)
    return memoryview(bytearray(b"12345" + file.getvalue() + b"67"))[5:-2]


def rezipped(archive: memoryview, records: dict[str, bytes], compression: int = zipfile.ZIP_STORED) -> memoryview:
    """Returns another archive of the same records. `records` replaces those of equal name."""
    file = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(file, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, records.get(Path(name).name, old.read(name)))
    return memoryview(bytearray(file.getvalue()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_saved_tensor_is_seen_as_torch_loads_it(dtype: torch.dtype) -> None:
    whole = torch.randn(5, 6, 7).to(dtype)
    for tensor in (whole, whole[1:4, ::2], whole.transpose(0, 2), whole[3, 2, 1]):
        memory = saved(tensor)
        found = saved_tensor(memory, "it")
        assert torch.equal(found, tensor) and found.stride() == tensor.stride()
        found.fill_(3.0)
        assert (torch.load(io.BytesIO(memory), weights_only=True) == 3.0).all(), "they are the same memory"


def test_a_mapped_file_is_not_changed_by_what_is_made_of_it(tmp_path: Path) -> None:
    torch.save(torch.ones(3), tmp_path / "one")
    saved_tensor(map_file(tmp_path / "one"), "it").zero_()
    assert torch.equal(torch.load(tmp_path / "one", weights_only=True), torch.ones(3))


def test_only_plain_tensors_are_taken() -> None:
    plain_one = saved(torch.ones(64, 64))
    refused = {
        r"where it lies holds an object made by torch\._utils\._rebuild_parameter; expected a plain tensor": saved(
            torch.nn.Parameter(torch.ones(3))
        ),
        "holds an object made by torch._utils._rebuild_sparse_tensor": saved(torch.eye(3).to_sparse()),
        "holds an object made by dict": saved({"one": torch.ones(3)}),
        r"holds a torch\.LongStorage; expected one of torch\.FloatStorage": saved(torch.arange(3)),
        "was written in big-endian order": rezipped(plain_one, {"byteorder": b"big"}),
        r"holds archive/data\.pkl compressed": rezipped(plain_one, {}, zipfile.ZIP_DEFLATED),
        r"asks for os\.system, which is no data": rezipped(plain_one, {"data.pkl": b"cos\nsystem\n(S'true'\ntR."}),
    }
    for message, archive in refused.items():
        with pytest.raises(CheckpointError, match=message):
            saved_tensor(archive, "where it lies")


def test_a_tensor_that_is_larger_than_its_bytes_is_refused() -> None:
    archive = saved(torch.ones(4, 6))
    described = bytes(archive)[bytes(archive).index(b"\x80\x02c") :]
    for before, after in ((b"K\x04K\x06", b"K\x05K\x06"), (b"K\x06K\x01", b"K\x07K\x01"), (b"K\x18t", b"K\x19t")):
        assert described.count(before) == 1
        with pytest.raises((RuntimeError, ValueError), match="out of bounds|are in 96 bytes"):
            saved_tensor(memoryview(bytearray(bytes(archive).replace(before, after))), "it")


def test_a_missing_writer_is_told(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="A process is missing"):
        write_megatron(tmp_path, QWEN3, Grid((0, 1), tp=2), leave_out=1)
    assert not (tmp_path / "latest_checkpointed_iteration.txt").exists()


class Harm:
    """An object that creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return exec, (f"open({str(self.path)!r}, 'w')",)


@pytest.mark.parametrize("file", [".metadata", "common.pt"])
def test_code_in_a_checkpoint_is_refused_and_not_run(file: str, copy: Path, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    if file == "common.pt":
        torch.save({"args": Namespace(num_layers=Harm(victim))}, copy / FOLDER / file)
    else:
        (copy / FOLDER / file).write_bytes(pickle.dumps(Harm(victim)))
    with pytest.raises(CheckpointError, match=r"asks for builtins\.exec, which is no data"):
        MegatronReader(copy, "--input")
    assert not victim.exists()


@pytest.mark.parametrize("module", ["os", "posix", "subprocess", "importlib", "builtins", "sys", "rltrain.trainer"])
def test_only_packages_of_known_data_may_be_named(module: str, tmp_path: Path) -> None:
    (tmp_path / "pickle").write_bytes(b"c" + module.encode() + b"\nsystem\n(S'true'\ntR.")
    with pytest.raises(CheckpointError, match=f"{module}.system"):
        read_pickle(tmp_path / "pickle")


def test_functions_of_known_packages_are_not_called(tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    (tmp_path / "pickle").write_bytes(f"ctorch\nsave\n(I1\nS'{victim}'\ntR.".encode())
    assert plain(read_pickle(tmp_path / "pickle")) == str(victim)
    assert not victim.exists()


def test_arguments_become_plain_values(tmp_path: Path) -> None:
    arguments = Namespace(
        attention_backend=AttnBackend.fused,
        load=Path("/checkpoints/one"),
        params_dtype=torch.bfloat16,
        activation=torch.nn.functional.silu,
        betas=(0.9, 0.95),
        names={"one"},
        inner=Namespace(one=1),
        rng=torch.zeros(3),
    )
    torch.save({"args": arguments}, tmp_path / "common.pt")
    found = plain(read_torch_pickle(tmp_path / "common.pt"))["args"]
    assert found.pop("rng") is not None
    assert found == {
        "attention_backend": AttnBackend.fused.value,
        "load": "/checkpoints/one",
        "params_dtype": "torch.bfloat16",
        "activation": "torch.nn.functional.silu",
        "betas": [0.9, 0.95],
        "names": ["one"],
        "inner": {"one": 1},
    }


LAYERS = "decoder.layers."


def global_values(architecture: Architecture, tensors: GlobalTensors) -> dict[str, Tensor]:
    """Returns the global tensors, assembled from the locations of the canonical ones. Elements without a location are
    NaN."""
    whole = {key: torch.full(shape, float("nan")) for key, shape in tensors.shapes.items()}
    for number, value in enumerate(canonical_values(architecture).values()):
        matrix = value.reshape(-1, value.shape[-1])
        for box in tensors.location(number):
            chunk = tensors.chunk_of(box)
            place = tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.shape, strict=True))
            rows, cols = slice(box["row"], box["row"] + box["rows"]), slice(box["col"], box["col"] + box["cols"])
            assert whole[chunk.key][place].isnan().all(), "each element is read once"
            whole[chunk.key][place] = matrix[rows, cols].reshape(chunk.shape)
    return whole


def values_of(name: str) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Returns the global tensors of a model, and its canonical ones."""
    return global_values(ARCHITECTURES[name], GlobalTensors(ARCHITECTURES[name])), canonical_values(ARCHITECTURES[name])


def test_layers_of_a_dense_model_are_stacked() -> None:
    values, names = values_of("qwen3")
    mlp = values[LAYERS + "mlp.linear_fc1.weight"]
    assert mlp.shape == (4, 48, 12)
    for layer in range(4):
        prefix = f"model.layers.{layer}."
        gate, up = names[prefix + "mlp.gate_proj.weight"], names[prefix + "mlp.up_proj.weight"]
        assert torch.equal(mlp[layer], torch.cat([gate, up]))
        fused_norm = values[LAYERS + "self_attention.linear_qkv.layer_norm_weight"][layer]
        assert torch.equal(fused_norm, names[prefix + "input_layernorm.weight"])


def test_queries_stand_beside_the_keys_and_values_of_their_group() -> None:
    values, names = values_of("qwen2_tied")
    q, k, v = (names[f"model.layers.3.self_attn.{part}_proj.bias"].view(2, -1) for part in "qkv")
    assert torch.equal(values[LAYERS + "self_attention.linear_qkv.bias"][3], torch.cat([q, k, v], dim=1).flatten())


def test_layers_beside_experts_have_numbers_and_experts_are_stacked() -> None:
    values, names = values_of("qwen3_moe")
    down = [names[f"model.layers.2.mlp.experts.{expert}.down_proj.weight"] for expert in range(4)]
    assert torch.equal(values[LAYERS + "2.mlp.experts.experts.linear_fc2.weight"], torch.stack(down))
    assert torch.equal(values[LAYERS + "1.mlp.linear_fc2.weight"], names["model.layers.1.mlp.down_proj.weight"])


def test_rows_beyond_the_vocabulary_are_padding() -> None:
    architecture = ARCHITECTURES["qwen3"]
    assert GlobalTensors(architecture).shapes["output_layer.weight"] == (128, 12), "as Megatron-LM pads"
    values = global_values(architecture, GlobalTensors(architecture, padded_vocab_size=24))
    assert values["output_layer.weight"][:, 0].isnan().tolist() == [False] * 21 + [True] * 3
    with pytest.raises(CheckpointError, match="20 rows.*21"):
        GlobalTensors(architecture, padded_vocab_size=20)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_all_but_the_padded_vocabulary_is_covered(name: str) -> None:
    architecture = ARCHITECTURES[name]
    tensors = GlobalTensors(architecture, padded_vocab_size=architecture.vocab_size)
    assert not any(value.isnan().any() for value in global_values(architecture, tensors).values())
    assert sum(value.numel() for value in global_values(architecture, tensors).values()) == sum(
        torch.Size(shape).numel() for shape in canonical_tensors(architecture).shapes
    )


@pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
def test_layers_with_experts_may_be_stacked_too(name: str) -> None:
    sparse_only = {"mixtral": True, "qwen3_moe": False}[name]
    architecture = ARCHITECTURES[name]
    shapes = GlobalTensors(architecture, stacked=sparse_only).shapes
    assert GlobalTensors.stored_as(architecture, shapes).shapes == shapes
    assert ((4, 4, 48, 12) in shapes.values()) == sparse_only


def test_other_tensors_than_the_models_are_named() -> None:
    architecture = ARCHITECTURES["qwen3"]
    shapes = dict(GlobalTensors(architecture).shapes)
    del shapes["decoder.final_layernorm.weight"]
    shapes |= {"output_layer.bias": (128,), LAYERS + "mlp.linear_fc2.weight": (4, 12, 23)}
    with pytest.raises(CheckpointError) as told:
        GlobalTensors.stored_as(architecture, shapes)
    assert "the checkpoint lacks decoder.final_layernorm.weight" in str(told.value)
    assert "the model does not have output_layer.bias" in str(told.value)
    assert "decoder.layers.mlp.linear_fc2.weight [4, 12, 23] instead of [4, 12, 24]" in str(told.value)


@st.composite
def writers(draw: st.DrawFn) -> Grid:
    tp, pp, ep, replicas = (draw(st.integers(1, 4)) for _ in range(4))
    return Grid(tuple(range(tp * pp * ep * replicas)), tp=tp, pp=pp, ep=ep, etp=draw(st.sampled_from([1, tp, None])))


@given(grid=writers(), name=st.sampled_from(list(ARCHITECTURES)))
@settings(max_examples=25)
def test_writers_share_out_every_element_once(grid: Grid, name: str) -> None:
    tensors = GlobalTensors(ARCHITECTURES[name])
    written = {key: torch.zeros(shape, dtype=torch.int32) for key, shape in tensors.shapes.items()}
    for rank in grid.ranks:
        for chunk in chunks_of_writer(tensors, grid, rank):
            written[chunk.key][
                tuple(slice(at, at + size) for at, size in zip(chunk.offsets, chunk.shape, strict=True))
            ] += 1
    assert all((count == 1).all() for count in written.values())


def test_writers_of_a_layout_that_divides_hold_as_much_as_its_ranks() -> None:
    tensors = GlobalTensors(ARCHITECTURES["mixtral"])
    grid = Grid(tuple(range(8)), tp=2, pp=2, ep=2, etp=2)
    sizes = [
        sum(torch.Size(chunk.shape).numel() for chunk in chunks_of_writer(tensors, grid, rank)) for rank in grid.ranks
    ]
    total = sum(torch.Size(shape).numel() for shape in tensors.shapes.values())
    assert max(sizes) < 1.5 * total / 8


def test_extra_states_are_those_that_transformer_engine_asks_for() -> None:
    stacked = extra_state_keys(GlobalTensors(ARCHITECTURES["qwen3"]))
    assert LAYERS + "self_attention.linear_qkv._extra_state/shard_3_4" in stacked
    assert LAYERS + "self_attention.core_attention._extra_state/shard_0_4" in stacked
    assert "decoder.final_layernorm._extra_state/shard_0_1" in stacked
    assert not any("output_layer" in key or "embedding" in key for key in stacked)
    sparse = extra_state_keys(GlobalTensors(ARCHITECTURES["mixtral"]))
    assert LAYERS + "2.mlp.experts.experts.linear_fc1._extra_state/shard_3_4" in sparse
    assert LAYERS + "2.self_attention.linear_qkv._extra_state/shard_0_1" in sparse


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_written_arguments_are_those_of_the_architecture(name: str) -> None:
    assert compare_arguments(ARCHITECTURES[name], megatron_arguments(ARCHITECTURES[name], dtype="bfloat16")) == []


@pytest.mark.parametrize(
    ("name", "changes", "expected"),
    [
        ("qwen3", {"vocab_size": 22}, ("vocab_size", 21, 22)),
        (
            "mixtral",
            {"moe": replace(ARCHITECTURES["mixtral"].moe, num_experts=8)},  # type: ignore[type-var]
            ("num_experts", 4, 8),
        ),
        ("qwen3", {"rope_theta": 5e5}, ("rotary_base", 10000.0, 5e5)),
        ("qwen3", {"tied_embeddings": True}, ("untie_embeddings_and_output_weights", True, False)),
        ("qwen3", {"num_kv_heads": 1}, ("num_query_groups", 2, 1)),
        ("qwen3", {"norm_eps": 1e-5}, ("norm_epsilon", 1e-6, 1e-5)),
    ],
)
def test_what_differs_is_told_with_both_values(name: str, changes: dict[str, Any], expected: tuple[Any, ...]) -> None:
    written = megatron_arguments(ARCHITECTURES[name], dtype="float32")
    assert compare_arguments(replace(ARCHITECTURES[name], **changes), written) == [expected]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("mixtral", {"moe_layer_freq": 1}),
        ("qwen3", {"rotary_base": 10000, "num_experts": None, "vocab_size": None}),
        ("qwen3", {"disable_bias_linear": True, "add_bias_linear": True}),
    ],
)
def test_other_ways_to_say_the_same_are_understood(name: str, said: dict[str, Any]) -> None:
    architecture: Architecture = ARCHITECTURES[name]
    assert compare_arguments(architecture, megatron_arguments(architecture, dtype="float32") | said) == []
