"""DeviceMesh, as torch.distributed has it."""

import copy
import pickle

import pytest
import torch
from ranks import on_ranks

import tessera
from tessera import DeviceMesh


@on_ranks(8)
def test_a_mesh_knows_its_ranks():
    mesh = tessera.init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
    rank = tessera.get_rank()
    assert (
        mesh.shape == (2, 4)
        and mesh.ndim == 2
        and mesh.size() == 8
        and mesh.size(0) == 2
        and mesh.size(-1) == 4
    )
    assert mesh.device_type == "cpu" and mesh.mesh_dim_names == ("dp", "tp")
    assert torch.equal(mesh.mesh, torch.arange(8).reshape(2, 4))
    assert mesh.get_rank() == rank and mesh.get_coordinate() == (rank // 4, rank % 4)
    assert mesh.get_local_rank("dp") == rank // 4 and mesh.get_local_rank(1) == rank % 4
    assert mesh["tp"].get_local_rank() == rank % 4 and mesh["dp"].shape == (2,)
    assert mesh[("dp", "tp")].shape == mesh["dp", "tp"].shape == (2, 4)
    assert (
        repr(mesh["tp"])
        == f"DeviceMesh(tp=4, 'cpu', ranks=[{', '.join(str(rank // 4 * 4 + i) for i in range(4))}])"
    )
    assert mesh == DeviceMesh("cpu", [[0, 1, 2, 3], [4, 5, 6, 7]], mesh_dim_names=("dp", "tp"))
    assert mesh != DeviceMesh("cpu", torch.arange(8).reshape(2, 4)) and mesh != 1
    assert hash(mesh) == hash(copy.deepcopy(mesh)) and copy.copy(mesh) == mesh
    assert pickle.loads(pickle.dumps(mesh)) == mesh
    assert DeviceMesh("cpu", torch.arange(8)).mesh_dim_names is None


@on_ranks(8)
def test_parts_and_other_shapes_of_a_mesh():
    mesh = tessera.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    flat = mesh["dp", "cp"]._flatten("both")
    assert flat.shape == (4,) and mesh["both"] == flat
    assert mesh["tp"]._get_root_mesh() == mesh
    assert DeviceMesh._concatenate([mesh["tp"], mesh["dp"]]).mesh_dim_names == ("tp", "dp")
    again = tessera.init_device_mesh("cpu", (8,), mesh_dim_names=("all",))._unflatten(0, (2, 4), ("a", "b"))
    assert again.shape == (2, 4) and again.mesh_dim_names == ("a", "b")
    assert len(mesh._get_all_submeshes("tp")) == 4


@on_ranks(4)
def test_groups():
    mesh = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    group = mesh.get_group("tp")
    assert group.size() == 2 and group.rank() == tessera.get_rank() % 2
    assert mesh.get_group(1) is group and len(mesh.get_all_groups()) == 2
    value = torch.ones(3) * tessera.get_rank()
    group.allreduce([value]).wait()
    assert value[0].item() == (1.0 if tessera.get_rank() < 2 else 5.0)
    again = DeviceMesh.from_group(mesh.get_all_groups(), "cpu", mesh.mesh, mesh_dim_names=("dp", "tp"))
    assert again == mesh
    assert DeviceMesh.from_group(group, "cpu").size() == 2


@on_ranks(4)
def test_ranks_outside_the_mesh():
    mesh = DeviceMesh("cpu", [0, 2])
    inside = tessera.get_rank() in (0, 2)
    assert mesh._is_current_rank_part_of_mesh() == inside
    assert (mesh.get_coordinate() is not None) == inside
    x = tessera.ones(4, device_mesh=mesh, placements=[tessera.Shard(0)])
    assert x.shape == (4,)
    if not inside:
        with pytest.raises(RuntimeError, match="not in"):
            mesh.get_group()


@on_ranks(4)
def test_bad_meshes_are_errors():
    for error, make in (
        (ValueError, lambda: tessera.init_device_mesh("cpu", (8,))),
        (ValueError, lambda: DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a", "a"))),
        (ValueError, lambda: DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("a",))),
        (ValueError, lambda: DeviceMesh("cpu", [0, 0])),
        (RuntimeError, lambda: tessera.init_device_mesh("nothing", (4,))),
        ((ValueError, RuntimeError), lambda: tessera.init_device_mesh("xla", (4,))),
        (
            (KeyError, ValueError, IndexError),
            lambda: tessera.init_device_mesh("cpu", (4,), mesh_dim_names=("a",))["b"],
        ),
    ):
        with pytest.raises(error):
            make()


@on_ranks(4)
def test_errors_have_the_types_that_torch_gives_them():
    init = tessera.init_device_mesh
    mesh = init("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(RuntimeError, match="Each mesh_dim_name must be unique"):
        init("cpu", (2, 2), mesh_dim_names=("dp", "dp"))
    with pytest.raises(RuntimeError, match="should have same length"):
        init("cpu", (2, 2), mesh_dim_names=("dp",))
    with pytest.raises(RuntimeError, match="Device type with index is not supported"):
        init("cuda:0", (2, 2))
    with pytest.raises(KeyError, match="Invalid mesh_dim_name.*'pp'"):
        mesh["pp"]
    with pytest.raises(KeyError, match="order"):
        mesh["tp", "dp"]
    with pytest.raises(RuntimeError, match="Cannot slice a DeviceMesh without mesh_dim_names"):
        init("cpu", (2, 2))["dp"]
    with pytest.raises(RuntimeError, match="`mesh_dim` needs to be specified"):
        mesh.get_local_rank()
    with pytest.raises(RuntimeError, match=r"invalid keys in backend_override: got \['pp'\]"):
        init("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"pp": "gloo"})
    with pytest.raises(RuntimeError, match="redundant dim index 0 and name dp"):
        init("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "gloo", 0: "gloo"})
    with pytest.raises(RuntimeError, match="threads"):
        init("cpu", (2, 2), mesh_dim_names=("dp", "tp"), backend_override={"dp": "gloo"})


@on_ranks(4)
def test_names_need_not_be_identifiers():
    mesh = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("mesh-0", "mesh-1"))
    assert mesh["mesh-1"].size() == 2
    x = tessera.distribute_tensor(torch.arange(8.0), mesh, [tessera.Shard(0), tessera.Replicate()])
    assert torch.equal(pickle.loads(pickle.dumps(x)).full_tensor(), torch.arange(8.0))
    with pytest.raises(ValueError, match="has a space"):
        mesh._flatten("a b")


@on_ranks(4)
def test_what_torch_tells_of_a_mesh():
    mesh = tessera.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    assert mesh.mesh.dtype == torch.int32
    assert mesh.get_group("tp").group_desc == "mesh_tp"
    flat = mesh._flatten("all")
    assert mesh._flatten_mapping == {"all": flat} and mesh["tp"]._flatten_mapping == {}
    plain = DeviceMesh("cpu", [[0, 1], [3, 2]], _init_backend=False)
    assert plain.get_group(0).group_desc == "mesh_dim_0"
