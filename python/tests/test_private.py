"""Private attributes of torch's that libraries use: see the table in docs/python.md."""

import math

import pytest
import torch
from ranks import meshes, on_ranks, placements_of, values
from tessera._dtensor_spec import DTensorSpec
from tessera._utils import compute_local_shape_and_global_offset
from torch.distributed import tensor as reference
from torch.distributed.tensor import placement_types as reference_types

import tessera
from tessera import DTensor, Partial, Replicate, Shard, _StridedShard, distribute_tensor, init_device_mesh


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
    with pytest.raises(AttributeError):
        x._spec.mesh = mesh


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
