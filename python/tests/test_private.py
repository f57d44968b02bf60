"""Private attributes of torch's that libraries use: see the table in docs/python.md."""

import itertools
import math

import pytest
import torch
from ranks import meshes, on_ranks, placements_of, values
from tessera._api import _shard_tensor
from tessera._dtensor_spec import DTensorSpec
from tessera._utils import (
    _compute_local_shape_and_global_offset,
    compute_global_tensor_info,
    compute_global_tensor_shape,
    compute_local_shape_and_global_offset,
    compute_local_stride,
    compute_local_tensor_info,
)
from torch.distributed import tensor as reference
from torch.distributed.tensor import _utils as reference_utils
from torch.distributed.tensor import placement_types as reference_types
from torch.distributed.tensor._dtensor_spec import ShardOrderEntry

import tessera
from tessera import DTensor, Partial, Replicate, Shard, _StridedShard, distribute_tensor, init_device_mesh
from tessera.debug import CommDebugMode


@on_ranks()
def test_spec():
    for mesh in meshes():
        for placements in placements_of(values(6, 5), mesh):
            x = distribute_tensor(values(6, 5), mesh, placements)
            spec = x._spec
            assert spec.mesh == spec.device_mesh == mesh and spec.placements == x.placements
            assert spec.tensor_meta.shape == spec.shape == (6, 5) and spec.tensor_meta.dtype == torch.float32
            assert spec.stride == spec.tensor_meta.stride == (5, 1) and spec.ndim == 2
            sharded = [dim for dim, placement in enumerate(placements) if placement.is_shard()]
            assert (
                spec.num_shards
                == math.prod(mesh.size(dim) for dim in sharded)
                == math.prod(spec.num_shards_map)
            )
            assert spec.is_sharded() == bool(sharded)
            assert spec.is_replicated() == all(placement.is_replicate() for placement in placements)
            assert spec.sums == [dim for dim, placement in enumerate(placements) if placement.is_partial()]
            again = distribute_tensor(values(6, 5), mesh, placements)._spec
            assert spec == again and hash(spec) == hash(again) and isinstance(spec, DTensorSpec)
            made = DTensor(x._local_tensor, spec, requires_grad=True)
            assert torch.equal(made, x) and made.requires_grad and made._spec == spec
    assert distribute_tensor(values(6, 5), mesh, [Shard(1), Replicate()])._spec.dim_map == [-1, 0]
    with pytest.raises(ValueError, match="mesh dims 0 and 1"):
        distribute_tensor(values(6, 5), mesh, [Shard(0), Shard(0)])._spec.dim_map
    assert not hasattr(values(2), "_spec")
    x._spec.mesh = mesh
    x._spec.use_strided_shard_as_shard_order = False
    with pytest.raises(AttributeError, match="only describes"):
        x._spec.mesh = init_device_mesh("cpu", (4,))
    with pytest.raises(AttributeError):
        x._spec.number = 1


@on_ranks()
def test_spec_says_in_which_order_mesh_dims_shard():
    mesh = init_device_mesh("cpu", (2, 2))
    x = values(8, 4)
    for placements, order, is_encoded in (
        ([Shard(0), Shard(0)], (ShardOrderEntry(0, (0, 1)),), False),
        ([Shard(1), Shard(0)], (ShardOrderEntry(0, (1,)), ShardOrderEntry(1, (0,))), False),
        ([Replicate(), Partial()], (), False),
        ([_StridedShard(0, split_factor=2), Shard(0)], (ShardOrderEntry(0, (1, 0)),), True),
        ([_StridedShard(0, split_factor=4), Replicate()], (ShardOrderEntry(0, (0,)),), False),
    ):
        spec = distribute_tensor(x, mesh, placements)._spec
        assert spec.shard_order == order and spec.use_strided_shard_as_shard_order == is_encoded
    line = init_device_mesh("cpu", (4,))
    joined = distribute_tensor(values(2, 4, 3), line, [Shard(1)]).flatten(0, 1)
    assert isinstance(joined.placements[0], _StridedShard)
    assert not (joined.relu() + 1)._spec.use_strided_shard_as_shard_order


@on_ranks()
def test_a_tensor_that_all_ranks_have_is_sharded_where_it_is():
    mesh = init_device_mesh("cpu", (2, 2))
    with CommDebugMode() as mode:
        sharded = _shard_tensor(values(4, 6), [Shard(0), Shard(1)], mesh)
    assert mode.get_total_counts() == 0
    assert torch.equal(sharded.full_tensor(), values(4, 6)) and sharded.placements == (Shard(0), Shard(1))


@on_ranks()
def test_the_local_tensor_can_be_written():
    mesh = tessera.init_device_mesh("cpu", (4,))
    x = distribute_tensor(torch.zeros(8), mesh, [Shard(0)])
    x._local_tensor.fill_(tessera.get_rank())
    assert x.full_tensor().tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


@pytest.mark.parametrize("size", [1, 7, 8, 10])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_shards_are_cut_as_torch_cuts_them(size, ranks):
    tensor = torch.arange(size * 2.0).reshape(size, 2)
    for options in ({}, {"with_padding": False}, {"contiguous": False}):
        mine, pads = Shard(0)._split_tensor(tensor, ranks, **options)
        theirs, their_pads = reference.Shard(0)._split_tensor(tensor, ranks, **options)
        assert pads == their_pads and all(map(torch.equal, mine, theirs))
    for rank in range(ranks):
        expected = reference.Shard.local_shard_size_and_offset(size, ranks, rank)
        assert Shard.local_shard_size_and_offset(size, ranks, rank) == expected
        for factor in (1, 2, 3):
            strided = _StridedShard(0, split_factor=factor)
            theirs = reference_types._StridedShard(0, split_factor=factor)
            for mode in range(3):
                expected = theirs.local_shard_size_and_offset(size, ranks, rank, mode)
                assert strided.local_shard_size_and_offset(size, ranks, rank, mode) == expected
            mine, pads = strided._split_tensor(tensor, ranks)
            expected, their_pads = theirs._split_tensor(tensor, ranks)
            assert pads == their_pads and all(map(torch.equal, mine, expected))
    assert Shard._get_shard_pad_size(3, tensor[:2], 0) == 3 - min(size, 2)


@on_ranks()
def test_shards_are_gathered_along_a_mesh_dim():
    mesh = init_device_mesh("cpu", (2, 2))
    for size in (1, 5, 8):
        for placement in (Shard(0), *(_StridedShard(0, split_factor=factor) for factor in (1, 2, 3))):
            for mesh_dim in (0, 1):
                index = mesh.get_coordinate()[mesh_dim]
                cut = (
                    placement._replicate_to_shard
                    if isinstance(placement, Shard)
                    else placement._replicate_to_strided_shard
                )
                shard = cut(values(size, 3), mesh, mesh_dim, index)
                expected = placement._split_tensor(values(size, 3), 2, with_padding=False)[0][index]
                assert torch.equal(shard, expected)
                whole = placement._to_replicate_tensor(shard, mesh, mesh_dim, [size, 3])
                assert torch.equal(whole, values(size, 3))
    columns = Shard(1)._select_split_tensor(values(2, 5), 4, 3, with_padding=True)
    assert torch.equal(
        columns, reference.Shard(1)._select_split_tensor(values(2, 5), 4, 3, with_padding=True)
    )


@on_ranks()
def test_local_shapes_and_offsets():
    mesh = tessera.init_device_mesh("cpu", (2, 2))
    row, column = mesh.get_coordinate()
    assert compute_local_shape_and_global_offset((5, 4), mesh, [Shard(0), Shard(1)]) == (
        (3 - row, 2),
        (3 * row, 2 * column),
    )
    assert compute_local_shape_and_global_offset((5, 4), mesh, [Replicate(), Partial()]) == ((5, 4), (0, 0))
    assert compute_local_shape_and_global_offset((5, 4), mesh, [Replicate(), Partial()], True) == ((5, 4), ())
    outside = tessera.DeviceMesh("cpu", [0])
    if tessera.get_rank() > 0:
        assert compute_local_shape_and_global_offset((5, 4), outside, [Shard(0)]) == ((0,), ())


def test_a_strided_shard_is_no_shard():
    strided = _StridedShard(0, split_factor=2)
    assert not strided.is_shard() and not strided.is_shard(0) and not isinstance(strided, Shard)
    assert Shard(0).is_shard() and Shard(0).is_shard(0) and not Shard(0).is_shard(1)
    assert Partial("prod") == Partial("product")


class _Sizes:
    """A mesh of which only the sizes count."""

    def size(self, dim):
        return (2, 3, 2)[dim]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1), (1, 2, 0)])
def test_shapes_and_strides_are_those_that_torch_computes(order):
    local = torch.empty([(2, 3, 4)[dim] for dim in order]).permute(*(order.index(dim) for dim in range(3)))
    kinds = [("R", None), ("P", None), ("S", 0), ("S", 1), ("S", 2)]
    for chosen in itertools.product(kinds, repeat=3):
        mine, theirs = (
            [
                module.Shard(dim) if kind == "S" else module.Partial() if kind == "P" else module.Replicate()
                for kind, dim in chosen
            ]
            for module in (tessera, reference)
        )
        shape, strides = compute_global_tensor_info(local, _Sizes(), mine)
        assert (shape, strides) == tuple(
            map(list, reference_utils.compute_global_tensor_info(local, _Sizes(), theirs))
        )
        whole = torch.empty_strided(shape, strides)
        expected = reference_utils.compute_local_tensor_info(whole, _Sizes(), theirs)
        assert compute_local_tensor_info(whole, _Sizes(), mine) == expected
        assert compute_local_stride(strides, (2, 3, 4)) == reference_utils.compute_local_stride(
            strides, (2, 3, 4)
        )
        at = (1, 2, 0)
        assert _compute_local_shape_and_global_offset((7, 5, 4), (2, 3, 2), at.__getitem__, mine) == (
            reference_utils._compute_local_shape_and_global_offset(
                (7, 5, 4), (2, 3, 2), at.__getitem__, theirs
            )
        )
    with pytest.raises(AssertionError, match="not divisible"):
        compute_local_tensor_info(torch.empty(5), _Sizes(), [Shard(0)])


@on_ranks()
def test_global_shapes_of_unlike_shards():
    mesh = init_device_mesh("cpu", (4,))
    rank = tessera.get_rank()
    assert compute_global_tensor_shape(torch.Size([5, rank]), mesh, [Shard(1)]) == (5, 6)
    assert compute_global_tensor_shape(torch.Size([5, 2]), mesh, [Replicate()]) == (5, 2)
    with pytest.raises(RuntimeError, match="identical size across ranks"):
        compute_global_tensor_shape(torch.Size([5 + rank % 2, rank]), mesh, [Shard(1)])
    with pytest.raises(NotImplementedError, match="1 placement"):
        compute_global_tensor_shape(torch.Size([5, 2]), mesh, [Shard(0), Shard(1)])


@on_ranks(8)
def test_layouts_of_meshes_are_torchs():
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    assert mesh["dp", "cp"]._flatten()._layout.collapse().global_ranks(8) == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert mesh["dp", "tp"]._flatten()._layout.collapse().global_ranks(8) == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert mesh["dp"]._layout.collapse().global_ranks(8) == [[0, 4], [1, 5], [2, 6], [3, 7]]
    assert mesh._flatten_mapping["dp_cp"]._layout == mesh["dp", "cp"]._flatten()._layout != mesh["tp"]._layout
    assert mesh["tp"]._flatten_rank_map == tuple(range(8)) == tuple(mesh._rank_map.tolist())
    assert mesh._coordinate_on_dim == mesh.get_coordinate()
    assert mesh._thread_id == mesh["dp"]._thread_id
    reference_mesh = reference.DeviceMesh("cpu", mesh.mesh, _init_backend=False, _rank=0)
    assert mesh._layout == reference_mesh._layout


@on_ranks()
def test_what_torch_has_of_meshes_and_partial_besides():
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh["dp"]._get_root_mesh_dim() == 0 and mesh["tp"]._get_root_mesh_dim() == 1
    assert mesh._get_root_mesh_dim() is None and init_device_mesh("cpu", (4,))._get_root_mesh_dim() is None
    assert mesh._dim_group_names == [mesh.get_group(name).group_name for name in ("dp", "tp")]
    assert mesh["tp"]._dim_group_names == mesh._dim_group_names[1:]
    for op in Partial.ALL_REDUCE_OPS:
        assert Partial(op).is_partial()
    assert set(Partial.LINEAR_REDUCE_OPS) < set(Partial.ALL_REDUCE_OPS)
