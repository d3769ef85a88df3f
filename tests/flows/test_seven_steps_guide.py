"""The guide "Seven steps instead of a hundred": its code does in a diffusers pipeline what the page says, and its numbers are the shipped results."""

import re
from pathlib import Path

import pytest
import torch

from tests.guides import measured_lines, not_shown

pytestmark = pytest.mark.torch
pytest.importorskip("diffusers")

GUIDE = Path(__file__).parents[2] / "docs" / "seven-steps.md"


def encoded(pipe):
    """`encode_prompt` of a pipeline whose text encoders are missing: random words for each prompt, given embeddings as they are."""

    def encode_prompt(prompt=None, *others, prompt_embeds=None, **rest):
        prompts = [prompt] if isinstance(prompt, str) else prompt
        draw = torch.Generator().manual_seed(sum(map(ord, "".join(prompts))))
        words, pooled = torch.randn(len(prompts), 5, 16, generator=draw), torch.randn(len(prompts), 8, generator=draw)
        return words, torch.zeros_like(words), pooled, torch.zeros_like(pooled)

    pipe.encode_prompt = encode_prompt
    return pipe


@pytest.fixture(scope="module")
def names(tmp_path_factory):
    """What the page's blocks leave behind, run in order on a tiny pipeline in the place of the hub's."""
    from tests.flows.ba_pipelines import stable_diffusion

    folder = tmp_path_factory.mktemp("guide")
    absent = "feature_extractor=None, image_encoder=None, **{f'{part}{number}': None for part in ('text_encoder', 'tokenizer') for number in ('', '_2', '_3')}"
    left = {"opened": encoded(stable_diffusion())}
    text = (
        GUIDE.read_text(encoding="utf-8")
        .replace("pipeline-7", f"{folder}/pipeline")
        .replace("sidenet-run", f"{folder}/run")
    )
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        code = re.sub(r'StableDiffusion3Pipeline\.from_pretrained\("stabilityai.*', "opened", code)
        code = re.sub(r'from_pretrained\("([^"]*)"\)', rf'from_pretrained("\1", {absent})', code)
        code = code.replace("width=128", "width=8").replace(
            "own_samples=512, steps=250, batch=16", "own_samples=8, own_steps=2, steps=3, batch=4"
        )
        exec(code, left)
    return left


def test_the_sidenet_is_trained_on_the_networks_own_samples(names):
    assert names["run"].calls == 4 + 3 * 9, "two steps of Heun, then a start and eight links in each of three chains"
    assert names["run"].finished


def test_seven_steps_ask_the_network_seven_times_on_the_grid_that_was_given(names):
    pipe, scheduler = names["pipe"], names["scheduler"]
    calls = []
    handle = pipe.transformer.register_forward_hook(lambda *a: calls.append(1))
    names["latents"](scheduler, 7)
    handle.remove()
    assert len(calls) == 7
    shift = scheduler.config.shift
    expected = torch.tensor([shift * s / (1 + (shift - 1) * s) for s in (*names["sigmas"], 0.0)])
    torch.testing.assert_close(scheduler.sigmas, expected)


def test_better_solvers_end_closer_to_a_hundred_steps(names):
    errors = names["errors"]
    assert set(errors) == {"Euler", "without", "SideNet"}
    assert errors["without"] < errors["Euler"], "of second order against first"
    assert float((names["latents"](names["euler"], 100) - names["reference"]).abs().max()) == 0


def test_the_saved_pipeline_has_its_sidenet(names):
    again = names["again"].scheduler
    assert again.config.sidenet == names["side"].settings
    for name, value in names["side"].state_dict().items():
        assert torch.equal(again.side.state_dict()[name], value)
    pipe = encoded(names["again"])
    names["pipe"].scheduler = names["scheduler"]
    pipe.set_progress_bar_config(disable=True)
    given = {"num_inference_steps": 7, "guidance_scale": 4.5, "output_type": "latent", "height": 8, "width": 8}
    found = [
        each("a red bicycle", **given, generator=torch.Generator().manual_seed(1)).images
        for each in (pipe, names["pipe"])
    ]
    assert torch.equal(*found)


def test_an_edit_keeps_the_old_prompt_where_it_is_not_changed(names):
    """Sampled again with its own label a latent comes back nearly; with the other it goes elsewhere."""
    from cameraready.flows.ba_solver import ba_sample

    back = ba_sample(names["velocity"], names["side"], names["noise"], steps=10, y=names["bicycle"]).x
    spread = names["reference"].std()
    assert (back - names["reference"]).square().mean().sqrt() < 0.5 * (
        names["edited"] - names["reference"]
    ).square().mean().sqrt()
    assert spread > 0


#: Headings of the page, and the verdicts whose estimates stand under them.
UNET, DIT, PLANE, SPACE = "digits-unet", "digits-dit", "mixture-2d", "mixture-16d"
MEASURED = {
    "Measure": [
        *((label, UNET) for label in ("8a", "8b", "8c", "8d", "3a", "6", "9", "5")),
        *((label, DIT) for label in ("8a", "8b", "8c", "6")),
        *((label, PLANE) for label in ("8a", "8c")),
        ("8b", SPACE),
    ],
    "Without training": [("12a", workload) for workload in (UNET, DIT, PLANE, SPACE)],
    "Keep it, and edit with it": [("7", UNET), ("13", UNET), ("13", DIT)],
}


@pytest.mark.parametrize("heading", MEASURED)
def test_every_number_is_a_shipped_result_with_its_verdict(heading):
    lines, wanted = measured_lines(GUIDE, heading), MEASURED[heading]
    assert len(lines) == len(wanted)
    assert not_shown(lines, "cameraready.flows.ba_solver", wanted) == []
