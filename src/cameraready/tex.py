"""Text as LaTeX and BibTeX take it: any string becomes source that prints that string, with plain pdflatex."""

from __future__ import annotations

import re
import unicodedata

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\textbraceleft{}",  # not \{: BibTeX counts braces, escaped or not
    "}": r"\textbraceright{}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\char34{}",  # \textquotedbl is not in the default font encoding
    "`": r"\textasciigrave{}",
    "\u00a0": "~",
    "\u202f": r"\,",
    "\u2009": r"\,",
    "\u200b": "",
    "\u00ad": r"\-",
    "\ufeff": "",
    "–": "--",
    "—": "---",
    "‐": "-",
    "‑": "-",
    "‘": "`",
    "’": "'",
    "“": "``",
    "”": "''",
    "„": ",,",
    "«": r"$\ll$",
    "»": r"$\gg$",
    "…": r"\ldots{}",
    "•": r"\textbullet{}",
    "¡": "{!`}",
    "¿": "{?`}",
    "†": r"\dag{}",
    "§": r"\S{}",
    "©": r"\copyright{}",
    "€": r"\texteuro{}",
    "£": r"\pounds{}",
    "ß": r"{\ss}",
    "ø": r"{\o}",
    "Ø": r"{\O}",
    "æ": r"{\ae}",
    "Æ": r"{\AE}",
    "œ": r"{\oe}",
    "Œ": r"{\OE}",
    "ł": r"{\l}",
    "Ł": r"{\L}",
    "å": r"{\aa}",
    "Å": r"{\AA}",
    "ı": r"{\i}",
}

#: Signs that print in text but may start a ligature with their neighbour: ``--``, ``''``, ``?`` + grave.
_LIGATURES = re.compile(r"-(?=-)|'(?=')|,(?=,)")

_MATH = {
    "−": "-", "×": r"\times", "÷": r"\div", "±": r"\pm", "∓": r"\mp", "·": r"\cdot", "⋅": r"\cdot", "∗": "*",
    "≤": r"\leq", "≥": r"\geq", "≪": r"\ll", "≫": r"\gg", "≠": r"\neq", "≈": r"\approx", "≡": r"\equiv",
    "∝": r"\propto", "∼": r"\sim", "→": r"\to", "←": r"\leftarrow", "↔": r"\leftrightarrow", "⇒": r"\Rightarrow",
    "↑": r"\uparrow", "↓": r"\downarrow", "∞": r"\infty", "∈": r"\in", "∉": r"\notin", "⊂": r"\subset",
    "⊆": r"\subseteq", "∪": r"\cup", "∩": r"\cap", "∅": r"\emptyset", "∑": r"\sum", "∏": r"\prod", "∫": r"\int",
    "√": r"\surd", "∂": r"\partial", "∇": r"\nabla", "∀": r"\forall", "∃": r"\exists", "¬": r"\neg", "∧": r"\wedge",
    "∨": r"\vee", "⊕": r"\oplus", "⊗": r"\otimes", "⊥": r"\perp", "∥": r"\parallel", "‖": r"\|", "⟨": r"\langle",
    "⟩": r"\rangle", "⌊": r"\lfloor", "⌋": r"\rfloor", "⌈": r"\lceil", "⌉": r"\rceil", "°": r"^\circ", "′": r"'",
    "ℓ": r"\ell", "ℝ": r"\mathbf{R}", "ℕ": r"\mathbf{N}", "ℤ": r"\mathbf{Z}", "𝔼": r"\mathbf{E}", "∘": r"\circ",
    "✓": r"\surd", "★": r"\star", "½": r"\frac12", "¼": r"\frac14", "¾": r"\frac34", "µ": r"\mu",
}  # fmt: skip
_GREEK = {
    "α": "alpha", "β": "beta", "γ": "gamma", "δ": "delta", "ε": "varepsilon", "ϵ": "epsilon", "ζ": "zeta",
    "η": "eta", "θ": "theta", "ϑ": "vartheta", "ι": "iota", "κ": "kappa", "λ": "lambda", "μ": "mu", "ν": "nu",
    "ξ": "xi", "π": "pi", "ρ": "rho", "σ": "sigma", "ς": "varsigma", "τ": "tau", "υ": "upsilon", "φ": "varphi",
    "ϕ": "phi", "χ": "chi", "ψ": "psi", "ω": "omega", "Γ": "Gamma", "Δ": "Delta", "Θ": "Theta", "Λ": "Lambda",
    "Ξ": "Xi", "Π": "Pi", "Σ": "Sigma", "Υ": "Upsilon", "Φ": "Phi", "Ψ": "Psi", "Ω": "Omega",
}  # fmt: skip
_SUPER = dict(zip("⁰¹²³⁴⁵⁶⁷⁸⁹⁺⁻ⁿ", "0123456789+-n", strict=True))
_SUB = dict(zip("₀₁₂₃₄₅₆₇₈₉₊₋", "0123456789+-", strict=True))

#: Accents that LaTeX's default font encoding has, by their combining character.
_ACCENTS = {
    "\u0300": "`", "\u0301": "'", "\u0302": "^", "\u0303": "~", "\u0304": "=", "\u0306": "u", "\u0307": ".",
    "\u0308": '"', "\u030a": "r", "\u030b": "H", "\u030c": "v", "\u0323": "d", "\u0327": "c", "\u0331": "b",
}  # fmt: skip


def escape(text: str) -> str:
    """LaTeX source, ASCII only, that prints `text` on one line; white space is collapsed.

    It needs no package. Characters that LaTeX's standard fonts lack (Chinese, emoji, letters with an ogonek) are printed
    as their code, ``[U+4E2D]``, so that a document always compiles and nothing vanishes.
    """
    text = unicodedata.normalize("NFC", " ".join(text.split()))
    return "".join(map(_character, _LIGATURES.sub(lambda match: f"{match[0]}\u2060", text)))


def _character(char: str) -> str:
    if char == "\u2060":
        return "{}"
    if char in _SPECIAL:
        return _SPECIAL[char]
    if " " <= char <= "~":
        return char
    if char in _MATH:
        return f"${_MATH[char]}$"
    if char in _GREEK:
        return rf"$\{_GREEK[char]}$"
    if char in _SUPER:
        return f"$^{{{_SUPER[char]}}}$"
    if char in _SUB:
        return f"$_{{{_SUB[char]}}}$"
    return _accented(char) or f"[U+{ord(char):04X}]"


def _accented(char: str) -> str:
    """``{\\'{e}}`` for é; empty unless the character is an ASCII letter with one accent that LaTeX has."""
    base, *marks = unicodedata.normalize("NFD", char)
    if len(marks) != 1 or marks[0] not in _ACCENTS or not base.isascii() or not base.isalpha():
        return ""
    dotless = base in "ij" and marks[0] not in "\u0323\u0327\u0331"
    return rf"{{\{_ACCENTS[marks[0]]}{{{chr(92) + base if dotless else base}}}}}"


def ascii_letters(text: str) -> str:
    """The letters and digits of `text` in ASCII, accents dropped: ``"Łukasz Gómez"`` -> ``"LukaszGomez"``."""
    plain = {"ß": "ss", "ø": "o", "Ø": "O", "æ": "ae", "Æ": "AE", "œ": "oe", "Œ": "OE", "ł": "l", "Ł": "L", "ı": "i"}
    text = "".join(plain.get(char, char) for char in text)
    return "".join(char for char in unicodedata.normalize("NFKD", text) if char.isascii() and char.isalnum())
