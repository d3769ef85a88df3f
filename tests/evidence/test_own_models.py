"""Language models of the user's: folders and files are understood, prompts and tasks go with them, a dry run tells their cost."""

import pytest

from cameraready.evidence.checking import UsageError, check
from cameraready.evidence.execution.cluster import cargo
from cameraready.evidence.execution.worker import Job
from cameraready.evidence.specs import SpecError, parse, with_own

MODEL = "tests.evidence.studies.own_model:STUDY"
VALUES = "tests.evidence.studies.own_data:STUDY"


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.setenv("CAMERAREADY_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def folder(here):
    made = here / "my-model"
    made.mkdir()
    (made / "config.json").write_text("{}")
    (made / "model.safetensors").write_bytes(b"weights")
    (made / "notes.md").write_text("mine")
    return made


@pytest.fixture
def prompts(here):
    path = here / "prompts.jsonl"
    path.write_text('{"prompt": "a", "answer": "b"}\n{"prompt": "c", "answer": "d"}\n')
    return path


def understood(text):
    return parse(text, shipped=["small"], accepts=["hf", "checkpoint"])


def smoke(**options):
    return check(MODEL, tier="smoke", quiet=True, **options)


class TestUnderstanding:
    def test_folders_and_gguf_files(self, here, folder):
        (here / "my.gguf").write_bytes(b"GGUF")
        found = understood("my-model")
        assert (found.kind, found.name, found.path) == ("checkpoint", "my-model", str(folder))
        assert understood("my-model/").path == str(folder)
        assert (understood("my.gguf").kind, understood("my.gguf").path) == ("checkpoint", str(here / "my.gguf"))

    def test_what_is_none_is_told(self, here, folder):
        (here / "empty").mkdir()
        for text, sentence in (
            ("empty", "a folder without config.json"),
            ("my.gguf", r"no file 'my.gguf'"),
            ("my-model/model.safetensors", "is of a kind"),
        ):
            with pytest.raises(SpecError, match=sentence):
                understood(text)
        (here / "my.gguf").write_bytes(b"GGUF")
        with pytest.raises(SpecError, match="nothing is named behind a language model, got 'a,b'"):
            understood("my.gguf:a,b")

    def test_content_of_the_files_that_matter_counts(self, here, folder):
        first = understood("my-model").content_digest()
        (folder / "notes.md").write_text("other notes")
        assert understood("my-model").content_digest() == first
        folder.rename(here / "moved")
        assert understood("moved").content_digest() == first
        (here / "moved" / "model.safetensors").write_bytes(b"others!")
        assert understood("moved").content_digest() != first


class TestDataAndTasks:
    def test_they_reach_the_workload(self, folder, prompts):
        result = smoke(on="my-model", data="prompts.jsonl:prompt,answer", tasks=["lm-eval:a", "passkey,b"])
        row = result.rows.row(0, named=True)
        assert (row["prompts"], row["columns"], row["tasks"]) == (2, "prompt,answer", "lm-eval:a,passkey,b")
        assert "--data prompts.jsonl:prompt,answer --tasks lm-eval:a" in result.command

    def test_a_shipped_model_with_own_prompts_is_the_users_workload(self, prompts):
        result = smoke(on="small", data="prompts.jsonl")
        assert set(result.rows["workload"]) == {"small+prompts.jsonl"}
        assert result.rows["own"].all()

    def test_objects_take_them_too(self, prompts):
        assert set(smoke(on=("model", "tokenizer"), data="prompts.jsonl").rows["prompts"]) == {2}

    def test_beside_objects_their_content_counts_and_not_their_place(self, prompts):
        from cameraready.evidence.planning import workloads_of
        from tests.evidence.studies.own_model import STUDY

        def digest(data):
            (load,) = workloads_of(STUDY, "smoke", ("model", "tokenizer"), data)
            return load.digest

        first = digest("prompts.jsonl:prompt")
        moved = prompts.rename(prompts.with_name("same.jsonl"))
        assert digest("same.jsonl:prompt") == first
        assert digest("same.jsonl:answer") != first
        moved.write_text("{}\n")
        assert digest("same.jsonl:prompt") != first

    def test_their_content_counts(self, prompts):
        plain = understood("hf:a/b")
        first = with_own(plain, data="prompts.jsonl:prompt").content_digest()
        assert len({plain.content_digest(), first, with_own(plain, tasks=["a"]).content_digest()}) == 3
        assert with_own(plain, data="prompts.jsonl:answer").content_digest() != first
        moved = prompts.rename(prompts.with_name("same.jsonl"))
        assert with_own(plain, data="same.jsonl:prompt").content_digest() == first
        moved.write_text("{}\n")
        assert with_own(plain, data="same.jsonl:prompt").content_digest() != first

    @pytest.mark.parametrize(
        ("options", "sentence"),
        [
            ({"data": "prompts.jsonl:prompt"}, "name one with --on"),
            ({"on": "small", "data": "prompt.jsonl:prompt"}, r"did you mean prompts\.jsonl"),
            ({"on": "small", "data": "text"}, "FILE:COLUMN,COLUMN"),
            ({"on": "small", "data": "prompts.jsonl:prompt,"}, "leaves a column without a name"),
            ({"on": "small", "data": "notes.md:prompt"}, "FILE:COLUMN|is no table"),
            ({"on": "small", "tasks": ["a,,b"]}, "leaves a task without a name"),
        ],
    )
    def test_what_cannot_be_meant_is_told(self, prompts, options, sentence):
        with pytest.raises((UsageError, SpecError), match=sentence):
            smoke(**options)

    def test_studies_that_take_none_say_so(self, prompts):
        with pytest.raises(UsageError, match="takes no data"):
            check(VALUES, tier="smoke", quiet=True, on="five", data="prompts.jsonl")


class TestCost:
    def test_a_dry_run_tells_hours_memory_and_downloads_of_the_users_model(self):
        plan = smoke(on="hf:org/large-8b", dry_run=True, device="cuda", dtype="bfloat16")
        assert (plan.hours, plan.memory_gib) == (2.0, 8.0)
        text = str(plan)
        assert "about 2.0 hours" in text
        assert "org/large-8b, 16 GB" in text
        assert "speed of cuda assumed" in text

    def test_more_memory_than_there_is_is_told(self, monkeypatch):
        from cameraready.evidence import planning

        free = [7]
        monkeypatch.setattr(
            planning.psutil, "virtual_memory", lambda: type("Memory", (), {"available": free[0] * 2**30})
        )
        assert "that does not fit: 7 GiB" in str(smoke(on="hf:org/large-8b", dry_run=True))
        assert "does not fit" not in str(smoke(on="hf:org/large-8b", dry_run=True, device="cuda"))
        free[0] = 17
        assert "does not fit" not in str(smoke(on="hf:org/large-8b", dry_run=True))

    def test_why_it_cannot_be_told_is_told(self):
        with pytest.raises(UsageError, match="what hf:org/nowhere would cost cannot be told: there is no such model"):
            smoke(on="hf:org/nowhere", dry_run=True)

    def test_what_was_measured_already_costs_nothing(self, folder):
        smoke(on="my-model")
        assert smoke(on="my-model", dry_run=True).hours == 0.0

    def test_shipped_workloads_are_told_from_the_ledger(self):
        assert smoke(dry_run=True).hours is None
        smoke()
        assert smoke(dry_run=True).hours == 0.0
        assert smoke(dry_run=True, seeds=2).hours > 0.0


def test_a_model_and_its_prompts_are_sent_to_a_host(here, folder, prompts):
    specs = {
        "a": with_own(understood("my-model"), data="prompts.jsonl:prompt"),
        "b": with_own(understood("hf:org/x"), data="prompts.jsonl:prompt"),
    }
    items = {item.name: item for item in cargo.packed(Job(MODEL, specs), {})}
    there = here / "there"
    for name, item in items.items():
        (there / name).parent.mkdir(parents=True, exist_ok=True)
        (there / name).write_bytes(b"".join(piece for piece, _ in item.pieces()))
    import cloudpickle

    job = cargo.placed(cloudpickle.loads((there / cargo.JOB).read_bytes()), there)
    for name, spec in job.specs.items():
        assert spec.content_digest() == specs[name].content_digest(), name
    assert job.specs["a"].path.startswith(str(there))
    assert job.specs["b"].path == ""
