"""README's example is run as it stands; its links lead somewhere."""

import pathlib
import re

import pytest

from jaxlab.data import assets

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()


@pytest.mark.skipif(assets.find_demo_model() is None, reason="the demo model is not fetched yet")
def test_the_example_runs(tmp_path, monkeypatch, capsys):
  monkeypatch.chdir(tmp_path)
  source = README.split("<!-- example: tests run this block -->\n```python\n")[1].split("```")[0]
  exec(compile(source, "README.md", "exec"), {"__name__": "readme"})  # our own text
  assert "Paris" in capsys.readouterr().out
  assert (tmp_path / "runs" / "my_model").is_dir()


def test_links_lead_somewhere():
  for target in re.findall(r"\]\(([^)#]+)\)", README):
    assert (ROOT / target).exists(), target


def test_commands_name_real_verbs_and_files():
  verbs = set(re.findall(r"python -m launch\.(\w+)", README)) - {"VERB"}
  for verb in verbs:
    assert (ROOT / "launch" / f"{verb}.py").exists(), verb
  for path in re.findall(r"--gin_file=(\S+?\.gin)", README):
    assert (ROOT / path).exists(), path
