"""Clusters: how they are written, and what is refused and why."""

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from fivefold.hardware.accelerators import ACCELERATORS, LINKS, PRECISIONS, Link, achieved, find_accelerator
from fivefold.hardware.cluster import Cluster, Group, accelerators
from fivefold.support.errors import UserError
from tests.refusals import refusal, same_words

groups = st.builds(Group, st.integers(1, 4096), st.integers(1, 72), st.sampled_from(list(ACCELERATORS.values())))
clusters = st.builds(Cluster, st.lists(groups, min_size=1, max_size=4).map(tuple))
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["H100", "8xB200"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["group", "nodes", "gpus", "accelerator", "name", "peak", "memory", "across", "bandwidth"])
            | st.text(max_size=4),
            inner,
            max_size=4,
        )
    ),
    max_leaves=8,
)


# How it is written


@given(clusters)
def test_a_cluster_reads_back_from_its_text(cluster):
    assert Cluster.parse(str(cluster)) == cluster


@given(clusters)
def test_a_cluster_reads_back_from_its_tables(cluster):
    assert Cluster.from_dict(cluster.to_dict()) == cluster


@pytest.mark.parametrize(
    ("text", "nodes", "world"),
    [
        ("8x8xH100", 8, 64),
        ("8xH100", 1, 8),
        ("H100", 1, 1),
        ("8x1xH100", 8, 8),
        ("2x72xGB200", 2, 144),
        ("1x64xH100", 1, 64),
        ("72xGB200", 1, 72),
        ("16xCPU", 1, 16),
        ("125000x8xH100", 125_000, 1_000_000),
    ],
)
def test_left_out_counts_are_one(text, nodes, world):
    cluster = Cluster.parse(text)
    assert (cluster.nodes, cluster.world, str(cluster)) == (nodes, world, text)


@pytest.mark.parametrize(
    ("text", "same"),
    [
        ("8h100", "8xH100"), ("8 H100", "8xH100"), ("2x8h100", "2x8xH100"), ("h100x8", "8xH100"), ("8xh100", "8xH100"),
        ("8 x H100", "8xH100"), ("2x8xh100", "2x8xH100"), ("H100:8", "8xH100"), ("h100-80gb", "H100"),
        ("8xH100-80GB", "8xH100"), ("4090", "RTX4090"), ("8x4090", "8xRTX4090"), ("4090:8", "8xRTX4090"),
        ("4090x8", "8xRTX4090"), ("rtx4090x4", "4xRTX4090"), ("RTX 5090", "RTX5090"), ("mi300x:8", "8xMI300X"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"), ("AMD Instinct MI300X OAM", "MI300X"), ("8xmi355x", "8xMI355X"),
    ],
)  # fmt: skip
def test_clusters_are_read_as_other_tools_write_them(text, same):
    assert str(Cluster.parse(text)) == same


@pytest.mark.parametrize(
    ("spelling", "name"),
    [
        ("A100", "A100-80"),
        ("a100-40gb", "A100-40"),
        ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("H100-SXM", "H100"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("h200", "H200"),
        ("GB200-NVL72", "GB200"),
        ("RTX 4090", "RTX4090"),
        ("NVIDIA GeForce RTX 4090", "RTX4090"),
        ("cpu", "CPU"),
    ],
)
def test_common_spellings_are_understood(spelling, name):
    assert find_accelerator(spelling).name == name
    assert str(Cluster.parse(f" 2 X 4 x {spelling} ")) == f"2x4x{name}"


@pytest.mark.parametrize(
    ("spelling", "name", "gib", "inside"),
    [
        ("NVIDIA A100-PCIE-40GB", "A100-PCIE-40", 40, 31.5),
        ("NVIDIA A100 80GB PCIe", "A100-PCIE-80", 80, 31.5),
        ("NVIDIA H100 PCIe", "H100-PCIE", 79.6, 63),
        ("A100-40GB", "A100-40", 40, 300),
        ("A100-SXM-80GB", "A100-80", 80, 300),
        ("NVIDIA A800-SXM4-80GB", "A800", 80, 200),
        ("NVIDIA H800", "H800", 79.6, 200),
        ("Tesla V100-SXM2-16GB", "V100-16", 16, 150),
        ("V100-32GB", "V100", 32, 150),
        ("AMD Instinct MI350X", "MI350X", 288, 537.6),
    ],
)
def test_a_board_has_its_own_memory_and_links(spelling, name, gib, inside):
    found = find_accelerator(spelling)
    assert (found.name, round(found.memory / 2**30, 1), found.inside.bandwidth / 1e9) == (name, gib, inside)


@pytest.mark.parametrize("name", ["H20", "NVIDIA A30", "T4", "GH200", "RTX 3090", "H20-96GB", "A2"])
def test_a_device_that_is_not_here_is_no_misprint_of_another(name):
    with pytest.raises(UserError, match=r"the catalogue has A100-40, .*fivefold calibrate -o \w+.toml"):
        find_accelerator(name)


def test_unlike_nodes_make_groups():
    cluster = Cluster.parse("4x8xH100+2x8xA100-80")
    assert [(group.nodes, group.gpus, group.accelerator.name) for group in cluster.groups] == [
        (4, 8, "H100"),
        (2, 8, "A100-80"),
    ]
    assert (cluster.world, cluster.nodes) == (48, 6)


def test_toml_says_the_same_as_text():
    tables = """
        [[cluster.group]]
        nodes = 4
        gpus = 8
        accelerator = "H100"
        [[cluster.group]]
        nodes = 2
        gpus = 8
        accelerator = "A100"
    """
    expected = Cluster.parse("4x8xH100+2x8xA100-80")
    assert Cluster.from_dict(tomllib.loads(tables)) == expected
    assert Cluster.from_dict(tomllib.loads(tables)["cluster"]) == expected
    assert Cluster.from_dict(tomllib.loads('cluster = "4x8xH100+2x8xA100-80"')) == expected
    assert Cluster.from_dict({"nodes": 8, "gpus": 8, "accelerator": "H100"}) == Cluster.parse("8x8xH100")


def test_an_override_replaces_only_what_it_names():
    usual = ACCELERATORS["H100"]
    table = {"nodes": 2, "gpus": 8, "accelerator": "H100", "memory": 60e9, "across": {"bandwidth": 25e9}}
    cluster = Cluster.from_dict(table)
    device = cluster.groups[0].accelerator
    assert device.memory == 60_000_000_000
    assert device.across == Link(25e9, usual.across.latency, usual.across.name)
    assert (device.peak, device.inside) == (usual.peak, usual.inside)
    assert str(cluster) == "2x8xH100*"  # which is not the catalogue's, and does not pass for it
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_a_link_can_be_named():
    cluster = Cluster.from_dict({"nodes": 2, "gpus": 8, "accelerator": "H100", "across": "roce-200g"})
    assert cluster.groups[0].accelerator.across == LINKS["RoCE-200G"]


def test_an_accelerator_can_be_given_inline():
    table = {
        "name": "MI300X",
        "peak": {"bf16": 1307.4e12},
        "memory": 192e9,
        "memory_bandwidth": 5.3e12,
        "inside": {"bandwidth": 448e9, "latency": 4e-6},
        "across": "InfiniBand-NDR",
    }
    cluster = Cluster.from_dict({"nodes": 2, "gpus": 8, "accelerator": table})
    assert cluster.groups[0].accelerator.rate("bf16") == 1307.4e12
    assert cluster.groups[0].accelerator.inside.bandwidth == 448e9
    assert of_cluster({"nodes": 2}).codes == ["cluster.accelerator"]
    assert Cluster.from_dict(cluster.to_dict()) == cluster


# An accelerator of one's own, in a file

FILE = """
name = "mine"
memory = 150e9
memory_bandwidth = 4.8e12
[peak]
bf16 = 989e12
[inside]
bandwidth = 450e9
latency = 3e-6
name = "NVLink4"
[across]
bandwidth = 50e9
latency = 14e-6
[achieved]
gemm = 0.75
units = 132
launch = 2e-6
source = "measured"
"""


@pytest.mark.parametrize(("counts", "nodes", "world"), [("", 1, 1), ("8x", 1, 8), ("2x8x", 2, 16)])
def test_a_file_stands_where_a_name_does(counts, nodes, world, tmp_path):
    folder = tmp_path / "my.dir"
    folder.mkdir()
    (folder / "8xh200.toml").write_text(FILE)
    cluster = Cluster.parse(f"{counts}{folder}/8xh200.toml")
    device = cluster.groups[0].accelerator
    assert (cluster.nodes, cluster.world, device.name) == (nodes, world, "mine")
    assert device.achieved is not None
    assert (device.achieved.gemm, device.achieved.units, device.achieved.launch) == (0.75, 132, 2e-6)
    assert Cluster.from_dict(cluster.to_dict()) == cluster
    assert Cluster.from_dict({"accelerator": f"{folder}/8xh200.toml"}).groups[0].accelerator == device
    with pytest.raises(UserError):
        Cluster.parse(str(cluster))


def test_what_a_file_leaves_out_is_as_the_catalogue_has_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("h100.toml").write_text(FILE.replace('"mine"', '"H100"', 1))
    device = Cluster.parse("8xh100.toml").groups[0].accelerator
    assert device.achieved == structs.replace(achieved("H100"), gemm=0.75, units=132, launch=2e-6, source="measured")


def test_shares_can_be_replaced_in_a_group():
    cluster = Cluster.from_dict({"gpus": 8, "accelerator": "H100", "achieved": {"gemm": 0.5}})
    assert cluster.groups[0].accelerator.achieved == structs.replace(achieved("H100"), gemm=0.5)
    assert Cluster.from_dict(cluster.to_dict()) == cluster


def test_a_bad_file_is_refused_in_a_sentence(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = of_cluster("8xh200.toml")
    assert (error.codes, "'fivefold calibrate -o h200.toml' makes one" in str(error)) == (["cluster.accelerator"], True)
    Path("h200b.toml").write_text("name =")
    assert str(of_cluster("8xh200.toml")).endswith("did you mean 'h200b.toml'?")
    assert of_cluster("h200b.toml").codes == ["file.syntax"]
    Path("dir.toml").mkdir()
    assert of_cluster("dir.toml").codes == ["file.read"]
    Path("part.toml").write_text(FILE.replace("gemm = 0.75", "gemm = 75").replace("memory = 150e9", ""))
    error = of_cluster("2x8xpart.toml")
    assert error.codes == ["cluster.missing", "cluster.share"]
    assert all(said.startswith("'2x8xpart.toml': part.toml: ") for said in error.problems)


# What is refused

NO_MEMORY = {"name": 300, "peak": {}, "memory_bandwidth": 5.3e12, "inside": {"bandwidth": 448e9, "latency": 4e-6}}
WRONG_SHARES = {"gem": 0.7, "stream": 0.0, "flash2": 1.6, "units": 0, "launch": -1, "ramp": "x", "source": ""}
WRONG_GROUPS = [
    {"node": 4, "accelerator": "H100", "memory": -1},
    {"accelerator": "CUP", "across": {"bandwith": 1e9, "latency": float("nan")}},
    {"nodes": True, "accelerator": "H100"},
]
REFUSED = [
    ("8x8xH10", "cluster.accelerator"),
    ("8xH100*", "cluster.accelerator"),  # a changed one does not pass for the catalogue's
    ("NVIDIA H100 NVL", "cluster.accelerator"),
    ("A100-PCIE", "cluster.accelerator"),
    ("Tesla V100-PCIE-16GB", "cluster.accelerator"),
    ("0x8xH100", "cluster.count"),
    ("8x-8xH100", "cluster.count"),
    ("1.5x8xH100", "cluster.count"),
    ("999999999x8xH100", "cluster.count"),
    ("1x999999999xH100", "cluster.count"),
    ("5000000x8xH100", "cluster.size"),
    ("2x5000000xH100+8xH100", "cluster.size"),
    ("8x8", "cluster.form"),
    ("2x8x8xH100", "cluster.form"),
    ("2x8x8h100", "cluster.form"),
    ("h100x8x8", "cluster.form"),
    ("H100:8x4", "cluster.form"),
    ("2xH100x8", "cluster.form"),
    ("", "cluster.form"),
    ("4x8xH100+", "cluster.form"),
    ("?!", "cluster.form"),
    ("64xH100", "cluster.node"),
    ("H100:16", "cluster.node"),
    ("17xh100", "cluster.node"),
    ("256xGB200", "cluster.node"),
    ("0x8xH10+2x0xB20", "cluster.count cluster.accelerator cluster.count cluster.accelerator"),
    ({"accelerator": "H100", "across": "RoCE-20G"}, "cluster.link"),
    ({"accelerator": NO_MEMORY}, "cluster.type cluster.missing cluster.missing"),
    ({"accelerator": "H100", "achieved": 3}, "cluster.type"),
    ({"accelerator": "H100", "achieved": WRONG_SHARES}, "cluster.key cluster.figure cluster.count cluster.share "
     "cluster.share cluster.figure cluster.type"),
    ({"group": WRONG_GROUPS, "grup": 1}, "cluster.key cluster.key cluster.figure cluster.accelerator cluster.key "
     "cluster.figure cluster.count"),
    ({"groups": [], "accelerator": "H100"}, "cluster.key"),
    ({"group": []}, "cluster.type"),
    ({"group": [3]}, "cluster.type"),
    (3, "cluster.type"),
]  # fmt: skip


def of_cluster(value: object) -> UserError:
    return refusal(lambda: Cluster.from_dict(value))


@pytest.mark.parametrize(("value", "codes"), REFUSED, ids=lambda value: str(value)[:20])
def test_what_is_no_cluster_is_refused(value, codes):
    assert of_cluster(value).codes == codes.split()


def test_the_words_of_refusals():
    same_words(__file__, {repr(value): of_cluster(value).problems for value, _ in REFUSED})


def read_or_refused(value: object) -> bool:
    """Anything but a cluster or a `UserError` is a crash that a user would see."""
    try:
        return Cluster.from_dict(value).world >= 1
    except UserError as error:
        return all(error.problems)


@given(st.text(max_size=30) | st.from_regex(r"[-0-9.]{0,5}x[-0-9.]{0,5}x[A-Z0-9+]{0,6}", fullmatch=True))
def test_any_text_is_read_or_refused_with_a_sentence(text):
    assert read_or_refused(text)


@given(anything)
def test_any_table_is_read_or_refused_with_a_sentence(value):
    assert read_or_refused(value)


# The catalogue


@pytest.mark.parametrize("device", ACCELERATORS.values(), ids=list(ACCELERATORS))
def test_the_catalogue_is_consistent(device):
    rates = [getattr(device.peak, name) for name in PRECISIONS]
    known = [rate for rate in rates if rate is not None]
    assert known == sorted(known), "a narrower format is never slower"
    assert device.peak.bf16 in (device.peak.fp16, None)  # it came with the A100
    assert device.inside.bandwidth >= device.across.bandwidth  # a TPU's torus is both
    assert device.inside.bandwidth < device.memory_bandwidth
    assert device.memory_bandwidth < device.peak.fp32


def test_rates_are_dense():
    # MFU in the field's papers is counted against these; a sparse figure here would halve every MFU.
    assert ACCELERATORS["A100-80"].rate("bf16") == 312e12
    assert round(ACCELERATORS["H100"].rate("bf16") / 1e12) == 989


def test_a_missing_precision_is_refused():
    error = refusal(lambda: ACCELERATORS["A100-80"].rate("fp8"))
    assert error.codes == ["precision.accelerator"]
    assert str(error) == "A100-80 has no fp8 rate; it has fp64, fp32, tf32, bf16, fp16"
    assert refusal(lambda: ACCELERATORS["H100"].rate("bf61")).codes == ["precision.unknown"]


def test_links_have_the_published_bandwidths() -> None:
    """One direction: half of what datasheets print for NVLink, an eighth of a port's bits."""
    gigabytes = {name: link.bandwidth / 1e9 for name, link in LINKS.items()}
    published = {"NVLink3": 300, "NVLink4": 450, "NVLink5": 900, "InfiniBand-HDR": 25, "InfiniBand-NDR": 50}
    assert {name: gigabytes[name] for name in published} == published


@pytest.mark.parametrize(
    ("name", "bf16", "fp8", "gigabytes", "bandwidth"),
    [  # dense, from the makers' data sheets
        ("MI300X", 1307.4, 2614.9, 192, 5.3),
        ("MI325X", 1307.4, 2614.9, 256, 6.0),
        ("MI355X", 2516.6, 5033.2, 288, 8.0),
        ("B300", 2250, 4500, 268, 8.0),
        ("L40S", 362.05, 733, 45, 0.864),
        ("A10G", 70, None, 22.5, 0.6),
        ("RTX4090", 165.2, 330.3, 24, 1.008),
        ("RTX5090", 209.5, 419, 32, 1.792),
    ],
)
def test_rates_are_dense_and_memory_is_what_the_driver_leaves(name, bf16, fp8, gigabytes, bandwidth):
    device = ACCELERATORS[name]
    assert (device.rate("bf16") / 1e12, device.peak.fp8 and device.peak.fp8 / 1e12) == (bf16, fp8)
    assert device.memory_bandwidth == bandwidth * 1e12
    assert 0.97 * gigabytes < device.memory / 2**30 <= gigabytes + 1


def test_every_accelerator_says_where_its_figures_come_from():
    found = {row["name"]: row for row in accelerators().to_dict()}
    assert found.keys() == ACCELERATORS.keys()
    assert all(len(source) > 10 for row in found.values() for source in row["sources"].values())
    pages = {name: row["page"] for name, row in found.items() if "page" in row}
    assert pages.keys() == {"MI300X", "MI325X", "MI350X", "MI355X", "A10G", "RTX5090"}
    assert all(pages[name] in str(accelerators(name)) for name in pages)
    assert found["MI300X"]["achieved"]["source"] == "a guess, as H100's"
    assert "measured by fivefold calibrate" in found["H200"]["achieved"]["source"]
    [one] = accelerators("h100-80gb").to_dict()
    assert one == found["H100"]
    assert "RTX5090" in str(accelerators())
    assert refusal(lambda: accelerators("H1000")).codes == ["cluster.accelerator"]
