"""Drawings of molecules as small SVG documents, and in words for those who do not see them."""

from __future__ import annotations

import re
from xml.etree import ElementTree
from xml.sax.saxutils import escape, quoteattr

from cameraready.flows._molecules.drugs import needs_extra, quietly
from cameraready.flows._molecules.properties import NAMES, properties

_SVG = "{http://www.w3.org/2000/svg}"


def draw(smiles: str, *, width: int = 200, height: int = 150, colour: str = "black") -> str:
    """A structural formula as an SVG document of about 1 to 2 kB.

    rdkit lays the molecule out and draws it; its bonds are gathered into one path. There is no background: `colour` is that of all
    strokes and letters, black for a white page, "currentColor" for an SVG that stands in a page and takes its text's colour.

    Parameters
    ----------
    smiles : str
        A molecule; the empty one gives an empty picture.
    width, height : int
        Pixels.
    colour : str
        A colour of CSS.

    Raises
    ------
    ImportError
        One line, where rdkit is missing.
    ValueError
        If rdkit cannot read `smiles`.
    """
    needs_extra()
    from rdkit import Chem
    from rdkit.Chem.Draw import rdMolDraw2D

    with quietly():
        molecule = Chem.MolFromSmiles(smiles)
    if molecule is None:
        raise ValueError(f"rdkit reads no molecule in {smiles!r}: expected SMILES, as Molecules.decode gives them")
    drawer = rdMolDraw2D.MolDraw2DSVG(width, height, -1, -1, True)
    options = drawer.drawOptions()
    options.useBWAtomPalette()
    options.clearBackground = False
    options.bondLineWidth = 1
    options.padding = 0.04
    drawer.DrawMolecule(molecule)
    drawer.FinishDrawing()
    lines, letters = [], []
    for element in ElementTree.fromstring(drawer.GetDrawingText()).iter():
        if element.tag == f"{_SVG}path":
            lines.append(_shorter(element.attrib["d"]))
        elif element.tag == f"{_SVG}text":
            size = re.search(r"font-size:(\d+)px", element.attrib["style"])
            anchor = f"x='{element.attrib['x']}' y='{element.attrib['y']}'"
            letters.append(f"<text {anchor} font-size='{size[1] if size else 8}'>{escape(element.text or '')}</text>")
    path = f"<path d='{''.join(lines)}' fill='none' stroke={quoteattr(colour)}/>" if lines else ""
    return (
        f"<svg xmlns='http://www.w3.org/2000/svg' width='{width}' height='{height}' viewBox='0 0 {width} {height}' role='img' "
        f"aria-label={quoteattr(described(smiles))}>{path}"
        f"<g fill={quoteattr(colour)} font-family='sans-serif'>{''.join(letters)}</g></svg>"
    )


def described(smiles: str) -> str:
    """A molecule in words, for a picture's alternative text: formula, rings, drug-likeness, accessibility."""
    needs_extra()
    from rdkit import Chem
    from rdkit.Chem import rdMolDescriptors

    molecule = Chem.MolFromSmiles(smiles)
    if molecule is None or molecule.GetNumAtoms() == 0:
        return "No molecule."
    values = dict(zip(NAMES, properties([smiles])[0].tolist(), strict=True))
    rings = rdMolDescriptors.CalcNumRings(molecule)
    return (
        f"Structural formula of {rdMolDescriptors.CalcMolFormula(molecule)} with {rings} ring{'' if rings == 1 else 's'}: "
        f"drug-likeness (QED) {values['qed']:.2f}, synthetic accessibility {values['sa']:.1f}; {smiles}"
    )


def _shorter(path: str) -> str:
    """A path without needless blanks: "M 8.0,50.2 L 28.3,54.5" as "M8,50.2L28.3,54.5"."""
    return re.sub(r"\s*([MLQCZ])\s*", r"\1", path.strip()).replace(".0,", ",").removesuffix(".0")
