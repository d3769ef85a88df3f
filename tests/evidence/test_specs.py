"""Specs of workloads: what is understood, what is refused and how it is said, objects, and digests of content."""

import os
import pickle
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cameraready.evidence.specs import Spec, SpecError, load_object, parse, value_spec

ALL = ("table", "model", "object", "hf", "gym")
SHIPPED = ("sum-12", "breast-cancer")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return tmp_path


def understood(text, accepts=ALL):
    return parse(text, shipped=SHIPPED, accepts=accepts)


def refusal(text, accepts=ALL):
    with pytest.raises(SpecError) as caught:
        parse(text, shipped=SHIPPED, accepts=accepts)
    return str(caught.value)


class TestUnderstanding:
    def test_kinds(self, here):
        (here / "data.csv").write_text("a,y\n1,2\n")
        (here / "model.json").write_text("{}")
        assert understood("sum-12").kind == "shipped"
        assert understood("hf:Qwen/Qwen3-0.6B").name == "Qwen/Qwen3-0.6B"
        assert understood("hf:gpt2@main").name == "gpt2@main"
        assert understood("gym:Hopper-v5").name == "Hopper-v5"
        assert understood("gym:ALE/Pong-v5").name == "ALE/Pong-v5"
        assert understood("package.module:Class.made").kind == "object"
        table = understood("data.csv:y")
        assert (table.kind, table.name, table.target, dict(table.options)) == ("table", "data.csv", "y", {})
        assert os.path.isabs(table.path)
        model = understood("model.json:data=data.csv,target=y")
        assert (model.kind, model.target, model.options["data"]) == ("model", "y", str(here / "data.csv"))
        assert (model.data.kind, model.data.path, model.data.target) == ("table", str(here / "data.csv"), "y")
        assert understood("model.json").data is None

    @pytest.mark.parametrize(
        ("rest", "target", "options"),
        [
            ("price, in EUR", "price, in EUR", {}),
            ("target=price, in EUR,treatment=t", "price, in EUR", {"treatment": "t"}),
            ("target=a=b", "a=b", {}),
            ("a:b", "a:b", {}),
            ("Ünïcode ☃", "Ünïcode ☃", {}),
            ("outcome=spend,treatment=emailed", "", {"outcome": "spend", "treatment": "emailed"}),
            ("", "", {}),
        ],
    )
    def test_targets_and_options(self, here, rest, target, options):
        (here / "d.csv").write_text("a,b\n1,2\n")
        spec = understood(f"d.csv:{rest}")
        assert (spec.target, dict(spec.options)) == (target, options)

    def test_longest_existing_path_wins(self, here):
        (here / "odd:name.csv").write_text("a,y\n1,2\n")
        (here / "odd").write_text("not this")
        spec = understood("odd:name.csv:y")
        assert (spec.name, spec.target) == ("odd:name.csv", "y")

    def test_drive_of_a_windows_path_is_no_target(self, here):
        assert "'C:\\\\data\\\\train.csv'" in refusal("C:\\data\\train.csv:price")

    def test_folder_beside_does_not_hide_a_module(self, here):
        (here / "mymodels").mkdir()
        assert understood("mymodels:net").kind == "object"
        assert "folder" in refusal("mymodels")

    def test_path_from_home(self, here, monkeypatch):
        monkeypatch.setenv("HOME", str(here))
        monkeypatch.setenv("USERPROFILE", str(here))
        (here / "d.csv").write_text("a,y\n1,2\n")
        assert understood("~/d.csv:y").path == str(here / "d.csv")

    def test_spec_is_a_value_that_crosses_processes(self, here):
        (here / "d.csv").write_text("a,y\n1,2\n")
        spec = understood("d.csv:y")
        again = pickle.loads(pickle.dumps(spec))
        assert again == spec
        assert hash(again) == hash(spec)

    def test_value_spec_describes_and_does_not_hold(self):
        spec = value_spec((len, np.zeros((3, 2))))
        assert spec.kind == "value"
        assert "(3, 2)" in spec.text
        assert spec.value is None
        assert spec.with_value(5).value == 5
        assert spec.with_value(5) == spec


class TestRefusing:
    @pytest.mark.parametrize("text", ["", "   ", ":", "::", "::::"])
    def test_nothing(self, text):
        assert "names nothing" in refusal(text)

    @pytest.mark.parametrize("text", ["hf:", "hf:a b", "hf:../../etc/passwd", "hf:a/b/c", "gym:", "gym:a b", "gym:x;y"])
    def test_names_that_are_none(self, text):
        assert "is no name of" in refusal(text)

    def test_says_what_is_accepted(self):
        message = refusal("nonsense", accepts=("table", "object"))
        assert "sum-12, breast-cancer" in message
        assert "data.csv:COLUMN" in message
        assert "package.module:object" in message
        assert "hf:" not in message

    def test_kind_that_the_study_does_not_take(self):
        message = refusal("hf:gpt2", accepts=("table",))
        assert "a Hugging Face model, which this study does not take" in message
        assert "data.csv:COLUMN" in message

    def test_near_misses(self, here):
        assert "did you mean breast-cancer" in refusal("brest-cancer")
        (here / "train.csv").write_text("a,y\n1,2\n")
        assert "did you mean train.csv" in refusal("trian.csv:y")

    @pytest.mark.parametrize("suffix", [".pkl", ".pickle", ".joblib", ".pt", ".PKL"])
    def test_pickles_are_refused_whether_there_or_not(self, here, suffix):
        assert "loading a pickle runs whatever code" in refusal(f"model{suffix}")
        (here / f"model{suffix}").write_bytes(b"x")
        assert "loading a pickle runs whatever code" in refusal(f"model{suffix}:target")

    @pytest.mark.parametrize(
        "text", ["a" * 100_000, "a" * 100_000 + ".csv:y", "x\0.csv:y", "/dev/zero", "~nobody-here/x.csv:y"]
    )
    def test_impossible_paths(self, text):
        message = refusal(text)
        assert len(message) < 1500

    def test_folders_and_unread_formats(self, here):
        (here / "folder.csv").mkdir()
        assert "is a folder" in refusal("folder.csv:y")
        (here / "t.xlsx").write_bytes(b"PK")
        assert "save it as .csv or .parquet" in refusal("t.xlsx:y")

    def test_options_that_say_nothing(self, here):
        (here / "d.csv").write_text("a,y\n1,2\n")
        (here / "m.json").write_text("{}")
        assert "empty" in refusal("d.csv:target=,a=b")
        assert "twice" in refusal("d.csv:target=a,target=b")
        assert "no file 'rows.csv'" in refusal("m.json:data=rows.csv,target=y")
        assert "m.json:data=rows.csv,target=COLUMN" in refusal("m.json:y")
        assert "is no table" in refusal("m.json:data=m.json,target=y")

    @given(st.text(max_size=40))
    def test_any_text_is_understood_or_refused_in_a_sentence(self, text):
        try:
            said = parse(text, shipped=SHIPPED, accepts=ALL).text
        except SpecError as error:
            said = str(error)
        assert said == text.strip() or "Accepted here: " in said


class TestObjects:
    def test_imports_what_is_named_from_the_current_folder(self, here):
        (here / "mine_one.py").write_text("class Game:\n    players = 3\n")
        assert load_object("mine_one:Game.players") == 3

    def test_understanding_runs_nothing(self, here):
        (here / "mine_two.py").write_text("raise SystemExit('ran')\n")
        assert understood("mine_two:anything").kind == "object"
        assert len(understood("mine_two:anything").content_digest()) == 64
        assert "mine_two" not in sys.modules

    def test_a_function_that_could_harm_is_returned_and_not_called(self):
        assert load_object("os:system") is os.system

    def test_errors_are_sentences(self, here):
        (here / "mine_three.py").write_text("import not_there_at_all\n")
        (here / "mine_four.py").write_text("1 / 0\n")
        (here / "mine_five.py").write_text("def predict(): ...\n")
        (here / "mine_six.py").write_text("def f(:\n")
        for text, message in {
            "not_here:x": "there is no module 'not_here' among the installed packages or in",
            "json.not_here:x": "there is no module 'json.not_here'",
            "mine_three:x": "needs the module 'not_there_at_all', which is not installed",
            "mine_four:x": "importing mine_four failed: ZeroDivisionError",
            "mine_five:predct": "mine_five has no 'predct'; did you mean predict",
            "mine_six:x": "importing mine_six failed: SyntaxError",
            "a b:c": "write package.module:object",
            "__import__('os').system('ls'):x": "write package.module:object",
            ":x": "write package.module:object",
            "x": "write package.module:object",
        }.items():
            with pytest.raises(SpecError) as caught:
                load_object(text)
            assert message in str(caught.value)


class TestDigests:
    def test_content_counts_and_place_does_not(self, here):
        (here / "a.csv").write_text("a,b\n1,2\n")
        (here / "sub").mkdir()
        (here / "sub" / "copy.csv").write_text("a,b\n1,2\n")
        first = understood("a.csv:b").content_digest()
        assert understood("sub/copy.csv:b").content_digest() == first
        assert understood("a.csv:a").content_digest() != first
        (here / "a.csv").write_text("a,b\n1,3\n")
        assert understood("a.csv:b").content_digest() != first

    def test_rows_of_a_model_count(self, here):
        (here / "m.json").write_text("{}")
        (here / "a.csv").write_text("a,b\n1,2\n")
        first = understood("m.json:data=a.csv,target=b").content_digest()
        assert understood("m.json").content_digest() != first
        (here / "a.csv").write_text("a,b\n1,33\n")
        assert understood("m.json:data=a.csv,target=b").content_digest() != first

    def test_objects_count_by_code_without_comments(self, here):
        module = here / "mine_seven.py"
        module.write_text("def f(x):\n    return x\n")
        first = understood("mine_seven:f").content_digest()
        module.write_text('def f(x):\n    """Documented."""\n    return x  # and explained\n')
        assert understood("mine_seven:f").content_digest() == first
        module.write_text("def f(x):\n    return x + 1\n")
        assert understood("mine_seven:f").content_digest() != first
        with pytest.raises(SpecError, match="cannot be read"):
            understood("not_here_either:f").content_digest()

    def test_names_count(self):
        texts = ["sum-12", "breast-cancer", "hf:a/b", "hf:a/c", "gym:A-v1", "gym:A-v2"]
        assert len({understood(text).content_digest() for text in texts}) == len(texts)
        with pytest.raises(SpecError, match="no content digest"):
            Spec("x", "value", "own").content_digest()


def test_a_question_ends_with_its_own_mark(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "yours.csv").write_text("a,b\n1,2\n")
    with pytest.raises(SpecError, match=r"did you mean yours\.csv\? Accepted here: "):
        parse("your.csv:b", shipped=[], accepts=["table"])
