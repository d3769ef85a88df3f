"""Imports point one way, also for rooms that nobody has listed anywhere."""

import functools

import grimp
import pytest

from cameraready.catalog import catalog

CARDS = catalog()


@functools.cache
def graph():
    return grimp.build_graph("cameraready")


def imported_by(module):
    """All modules that `module` and its sub-modules import directly."""
    inside = {module, *graph().find_descendants(module)}
    return {target for source in inside for target in graph().find_modules_directly_imported_by(source)} - inside


@pytest.mark.parametrize("part", ["evidence", "catalog", "card", "ranking", "citation"])
def test_the_engine_and_the_catalogue_know_no_room_and_no_command_line(part):
    forbidden = {"cameraready.cli", *(f"cameraready.{card.room}" for card in CARDS)}
    found = {name for name in imported_by(f"cameraready.{part}") if ".".join(name.split(".")[:2]) in forbidden}
    assert found == set()


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card.slug)
def test_a_component_knows_neither_its_study_nor_the_engine(card):
    # What the study alone imports may import the engine; what the component's exports reach may not.
    reached, waiting = set(), [card.module]
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting += graph().find_modules_directly_imported_by(module) - reached
    assert f"{card.module}.study" not in reached
    assert {name for name in reached if name.startswith(("cameraready.evidence", "cameraready.cli"))} == set()
