"""The jobs of recipes/: each is legal on its cluster, fits, and says in its first comment what the planner says."""

from pathlib import Path

import pytest
from tools import recipes
from tools.recipes import FOLDER, first_comment, planned, write

from fivefold.hardware.cluster import Cluster
from fivefold.job.preflight import needs_data
from fivefold.job.reading import RECIPES_DIR, read_job
from fivefold.job.recipes import recipe

FILES = sorted(FOLDER.glob("*.toml"))


def test_there_are_a_dozen_from_one_device_to_thousands() -> None:
    sizes = [Cluster.read(read_job(file).run.cluster).world for file in FILES]
    assert len(FILES) >= 12
    assert (min(sizes), max(sizes)) == (1, 16_384)
    # Those of the package: in a clone by a link, in an sdist as copies.
    assert {file.name: file.read_text() for file in FILES} == {
        file.name: file.read_text() for file in RECIPES_DIR.iterdir()
    }


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_a_recipe_is_what_the_planner_says(file: Path, tmp_path: Path) -> None:
    job = read_job(file)
    assert job.problems(world=Cluster.read(job.run.cluster).world) == []
    assert file.read_text().startswith(first_comment(job)), "python tools/recipes.py --write"
    assert planned(job).fits
    assert file.stem.startswith(job.model.name)
    assert file.stem.endswith(job.run.cluster)
    assert needs_data(job) == (job.model.name != "tiny")
    if "128k" not in file.stem:  # which goes on from trained weights
        usual = recipe(job.model, job.data.seq, job.train.steps * job.train.batch * job.data.seq)
        assert job.optimizer.lr == pytest.approx(usual["optimizer.lr"].value, rel=0.05)
    copy = tmp_path / file.name
    copy.write_text(file.read_text().replace("tokens/s", "bottles/s", 1))
    write(copy)
    assert copy.read_text() == file.read_text()


def test_a_recipe_is_found_where_there_is_no_checkout(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.warns(UserWarning, match="Fivefold's own"):
        assert read_job("recipes/llama3-8b-8xH100.toml").run.cluster == "8xH100"


def test_a_dry_run_is_held_against_the_planned_memory(monkeypatch, capsys) -> None:
    file = FOLDER / "tiny-2xCPU.toml"
    assert recipes.check(file)
    monkeypatch.setattr(recipes, "TOLERANCE", -1.0)  # which no memory is within
    assert not recipes.check(file)
    assert "FAILS" in capsys.readouterr().out
